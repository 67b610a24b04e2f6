"""The pictures of the documentation: up to date, readable on both grounds, and true."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest

from tools.house import ROOT, layers
from tools.pictures import sharding
from tools.pictures.catalog import PICTURES
from tools.pictures.palette import THEMES, contrast, seen_by

SVG = "{http://www.w3.org/2000/svg}"
HUES = ("blue", "orange", "green", "red", "purple", "slate")
BY_NAME = {picture.name: picture for picture in PICTURES}


def words_of(name, version="-light"):
    """Return all text in a picture, as a reader or a screen reader finds it."""
    path = next(path for path in BY_NAME[name].files() if path.stem.endswith(version))
    return " ".join("".join(each.itertext()) for each in ET.parse(path).iter(f"{SVG}text"))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_picture_is_up_to_date(name):
    for path, version in BY_NAME[name].files().items():
        assert path.read_text() == BY_NAME[name].svg(*version), "run make pictures"


def test_nothing_else_lies_beside_the_pictures():
    known = {path for picture in PICTURES for path in picture.files()}
    found = {path for path in (ROOT / "docs" / "images").rglob("*") if path.is_file()}
    assert found == known
    assert sum(path.stat().st_size for path in found) < 1_500_000
    assert max(path.stat().st_size for path in found if "gallery" in path.parts) < 60_000


@pytest.mark.parametrize("name", BY_NAME)
def test_the_text_is_inside_and_has_contrast(name):
    # Widths of the letters of a wide font, such as DejaVu Sans, so that others fit as well.
    for path, (palette, _) in BY_NAME[name].files().items():
        root = ET.parse(path).getroot()
        assert root.find(f"{SVG}title").text
        width, height = float(root.get("width")), float(root.get("height"))
        for text in root.iter(f"{SVG}text"):
            if text.get("transform"):
                continue
            content = "".join(text.itertext())
            size = float(text.get("font-size", 14))
            assert size >= 12, content
            letter = 0.62 if "mono" in text.get("font-family", "") else 0.55
            length = len(content) * size * letter
            shift = {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")]
            left = float(text.get("x")) - shift * length
            assert left >= -6, content
            assert left + length <= width + 6, content
            assert size * 0.7 <= float(text.get("y")) <= height, content
            colour = text.get("fill", palette.ink)
            is_in_terminal = text.find(f"{SVG}tspan") is not None or name in ("error", "watch")
            if colour.startswith("#") and not is_in_terminal:
                limit = 4.5 if colour in (palette.ink, palette.muted) else 2.9
                assert contrast(colour, palette.ground) >= limit, content


@pytest.mark.parametrize("theme", THEMES)
def test_colours_have_contrast_and_stay_apart_for_the_colour_blind(theme):
    palette = THEMES[theme]
    for ground in (palette.ground, palette.panel):
        assert contrast(palette.ink, ground) >= 7
        assert contrast(palette.muted, ground) >= 4.5
    for name in set(HUES) - {"slate"}:
        assert contrast(getattr(palette, name), palette.ground) >= 2.9, name
    for blindness in ("none", "protanopia", "deuteranopia", "tritanopia"):
        seen = {name: seen_by(blindness, getattr(palette, name)) for name in HUES}
        for one, other in itertools.combinations(HUES, 2):
            assert math.dist(seen[one], seen[other]) > 0.06, (blindness, one, other)


def test_the_contrast_of_black_and_white_is_21():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_the_order_of_examples_is_that_of_the_package():
    assert json.loads(BY_NAME["sharding"].data.read_text()) == sharding.record()


def test_the_picture_of_layers_shows_every_module():
    words = words_of("layers")
    assert all(module in words for modules in layers() for module in modules)


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "contexts": "replica context cross-replica context collective rank 0",
        "collective": "agree reduce CollectiveMismatchError",
        "checkpoint": "variables/ state/ digest",
        "gpu": "NCCL CUDA-aware staging",
        "error": "CollectiveMismatchError rank 0: rank 1: timeout 124",
        "reading": "mpistrat h5py DataLoader",
        "restart": "SIGKILL --resume",
        "survivors": "SIGKILL replicas ranks undisturbed",
        "timeline": "waiting others waited checkpoints",
    }.items(),
)
def test_it_mentions_what_it_is_about(name, said):
    words = words_of(name)
    assert [each for each in said.split() if each not in words] == []


@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.narrow])
def test_the_version_for_phones_fits_and_has_the_same_numbers(name):
    for path, (_, is_narrow) in BY_NAME[name].files().items():
        if is_narrow:
            assert float(ET.parse(path).getroot().get("width")) <= 360
    numbers = [
        set(re.findall(r"\d[\d.,]*", words_of(name, f"{each}-light"))) for each in ("", "-narrow")
    ]
    assert numbers[0] == numbers[1]


def test_the_error_names_the_lines_of_the_two_calls():
    program = ROOT / "tools" / "pictures" / "programs" / "evaluate_mpistrat.py"
    lines = program.read_text().splitlines()
    named = re.findall(r"rank \d: (\w+)[^:]* evaluate_mpistrat\.py:(\d+)", words_of("error"))
    assert len(named) == 2
    for call, number in named:
        assert f"strategy.{call}(" in lines[int(number) - 1]


def test_the_resumed_run_is_equal_to_the_undisturbed_one():
    recorded = json.loads(BY_NAME["restart"].data.read_text())
    assert 0 < recorded["killed_after"] < recorded["epochs"] == len(recorded["resumed"])
    assert recorded["resumed"] == pytest.approx(recorded["undisturbed"], rel=1e-4)


def test_the_run_that_lost_ranks_is_equal_to_the_undisturbed_one():
    recorded = json.loads(BY_NAME["survivors"].data.read_text())
    assert list(dict.fromkeys(recorded["ranks"])) == [4, 3, 2]
    assert len(recorded["ranks"]) == len(recorded["undisturbed"])
    assert recorded["disturbed"] == recorded["undisturbed"]


def test_recorded_runs_name_no_machine():
    for picture in PICTURES:
        if picture.record is not None:
            assert not re.search(r"/(tmp|home|root|work)/", picture.data.read_text()), picture.name
