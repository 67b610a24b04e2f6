"""Catalog of the pictures: what each is called, how it is drawn and which run it shows."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.house import ROOT
from tools.pictures import (
    checkpoint,
    collective,
    contexts,
    error,
    gallery,
    gpu,
    jobs,
    layers,
    reading,
    restart,
    sharding,
    survivors,
    timeline,
    watch,
)
from tools.pictures.palette import THEMES, Palette

__all__ = ["PICTURES", "Picture"]

_IMAGES = ROOT / "docs" / "images"
_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Picture:
    """One picture, in a light and a dark file."""

    name: str
    """Of its files below docs/images, without ``-light.svg`` and ``-dark.svg``."""
    draw: Callable[..., str]
    """Takes a palette, and what was recorded if there is a run to record."""
    record: Callable[[], dict[str, Any]] | None = None
    """Makes the run that the picture shows, and returns JSON values."""

    @property
    def data(self) -> Path:
        """The file of the recorded run."""
        return _DATA / f"{self.name.rpartition('/')[2]}.json"

    def files(self) -> dict[Path, Palette]:
        """Return the palette of each file."""
        return {_IMAGES / f"{self.name}-{theme}.svg": each for theme, each in THEMES.items()}

    def svg(self, palette: Palette) -> str:
        """Return the picture in the colours of `palette`."""
        if self.record is None:
            return self.draw(palette)
        return self.draw(palette, json.loads(self.data.read_text()))

    def write(self) -> None:
        """Write both files."""
        for path, palette in self.files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.svg(palette))

    def run(self) -> None:
        """Make the run again, and keep what it showed."""
        if self.record is not None:
            self.data.parent.mkdir(parents=True, exist_ok=True)
            rows = (f'"{key}": {json.dumps(value)}' for key, value in self.record().items())
            self.data.write_text("{\n" + ",\n".join(rows) + "\n}\n")


PICTURES = (
    Picture("layers", layers.draw),
    Picture("collective", collective.draw),
    Picture("contexts", contexts.draw),
    Picture("sharding", sharding.draw, sharding.record),
    Picture("checkpoint", checkpoint.draw),
    Picture("gpu", gpu.draw),
    Picture("error", error.draw, error.record),
    Picture("reading", reading.draw, reading.record),
    Picture("restart", restart.draw, restart.record),
    Picture("survivors", survivors.draw, survivors.record),
    Picture("timeline", timeline.draw, timeline.record),
    Picture("watch", watch.draw, watch.record),
    Picture("gallery/train_digits", gallery.digits, jobs.digits),
    Picture("gallery/kmeans", gallery.kmeans, jobs.kmeans),
    Picture("gallery/logistic_regression", gallery.logistic_regression, jobs.logistic_regression),
    Picture("gallery/train_torch_ddp", gallery.torch_ddp, jobs.torch_ddp),
    Picture("gallery/heat_inverse", gallery.heat_inverse, jobs.heat_inverse),
    Picture("gallery/infer", gallery.infer, jobs.infer),
)
