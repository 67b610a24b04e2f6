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
    """One picture, in light and dark files."""

    name: str
    """Of its files below docs/images, without ``-light.svg`` and ``-dark.svg``."""
    draw: Callable[..., str]
    """Takes a palette, and what was recorded if there is a run to record."""
    record: Callable[[], dict[str, Any]] | None = None
    """Makes the run that the picture shows, and returns JSON values."""
    narrow: Callable[..., str] | None = None
    """Draws the version for phones, 360 pixels wide, if there is one."""

    @property
    def data(self) -> Path:
        """The file of the recorded run."""
        return _DATA / f"{self.name.rpartition('/')[2]}.json"

    def files(self) -> dict[Path, tuple[Palette, bool]]:
        """Return for each file its palette, and whether it is the version for phones."""
        versions = {"": False} if self.narrow is None else {"": False, "-narrow": True}
        return {
            _IMAGES / f"{self.name}{version}-{theme}.svg": (palette, is_narrow)
            for version, is_narrow in versions.items()
            for theme, palette in THEMES.items()
        }

    def svg(self, palette: Palette, is_narrow: bool = False) -> str:
        """Return the picture in the colours of `palette`."""
        draw = self.narrow if is_narrow and self.narrow is not None else self.draw
        if self.record is None:
            return draw(palette)
        return draw(palette, json.loads(self.data.read_text()))

    def write(self) -> None:
        """Write all its files."""
        for path, version in self.files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.svg(*version))

    def run(self) -> None:
        """Make the run again, and keep what it showed."""
        if self.record is not None:
            self.data.parent.mkdir(parents=True, exist_ok=True)
            rows = (f'"{key}": {json.dumps(value)}' for key, value in self.record().items())
            self.data.write_text("{\n" + ",\n".join(rows) + "\n}\n")


PICTURES = (
    Picture("layers", layers.draw),
    Picture("collective", collective.draw),
    Picture("contexts", contexts.draw, narrow=contexts.draw_narrow),
    Picture("sharding", sharding.draw, sharding.record),
    Picture("checkpoint", checkpoint.draw),
    Picture("gpu", gpu.draw),
    Picture("error", error.draw, error.record, error.draw_narrow),
    Picture("reading", reading.draw, reading.record, reading.draw_narrow),
    Picture("restart", restart.draw, restart.record, restart.draw_narrow),
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
