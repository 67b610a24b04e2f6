"""Pictures of the jobs in the gallery, each from a real run on two ranks."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from tools.pictures.chart import Axis, Chart
from tools.pictures.palette import Palette, mix
from tools.pictures.svg import Drawing

__all__ = ["digits", "heat_inverse", "infer", "kmeans", "logistic_regression", "torch_ddp"]

_WIDTH, _HEIGHT = 440, 280
_BOX = (52, 62, 346, 224)


def _start(palette: Palette, title: str, detail: str) -> Drawing:
    d = Drawing(_WIDTH, _HEIGHT, palette, title)
    d.text(8, 20, title, bold=True, size=14.5)
    d.text(8, 39, detail, size=12.5, colour=palette.muted)
    return d


def _epochs(values: Sequence[float]) -> list[tuple[float, float]]:
    return list(enumerate(values, start=1))


def digits(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the learning curve of the perceptron."""
    p, train, test = palette, recorded["train"], recorded["test"]
    detail = f"{recorded['ranks']} ranks, test accuracy {recorded['accuracy']:.1%} at the end"
    d = _start(p, "Loss of a perceptron on digits", detail)
    y = Axis(0.02, 3, is_log=True, ticks=(0.03, 0.1, 0.3, 1))
    chart = Chart(d, _BOX, Axis(0, len(train), "epoch"), y)
    chart.frame()
    for values, name, colour in ((test, "test", p.orange), (train, "train", p.blue)):
        chart.curve(_epochs(values), colour)
        chart.label((len(values), values[-1]), f"{name} {values[-1]:.2g}", colour)
    return d.render()


def torch_ddp(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the learning curve of PyTorch's network."""
    p, loss, accuracy = palette, recorded["loss"], recorded["accuracy"]
    detail = f"{recorded['ranks']} ranks; test accuracy of each epoch"
    d = _start(p, "PyTorch's DistributedDataParallel over MPI", detail)
    low = math.floor(10 * min(accuracy)) / 10
    chart = Chart(d, _BOX, Axis(0, len(loss), "epoch"), Axis(low, 1))
    chart.frame()
    shown = _epochs(accuracy)
    chart.curve(shown, p.orange)
    for point in shown:
        d.circle(*chart.at(*point), 3, fill=p.orange)
    chart.label(shown[-1], f"{accuracy[-1]:.3f}", p.orange, bold=True)
    chart.label(shown[-1], f"loss {loss[-1]:.2g}", p.muted, shift=(8, 22))
    return d.render()


def kmeans(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return points in the colours of their clusters, and the centres."""
    p, points, centres = palette, recorded["points"], recorded["centres"]
    detail = f"{recorded['ranks']} ranks, {recorded['iterations']} iterations; 400 of 20,000 points"
    d = _start(p, "Six clusters found by k-means", detail)
    limits = [max(abs(point[axis]) for point in points) * 1.05 for axis in (0, 1)]
    box = (8, 52, _WIDTH - 8, _HEIGHT - 8)
    chart = Chart(d, box, Axis(-limits[0], limits[0]), Axis(-limits[1], limits[1]))
    d.rect(*box[:2], box[2] - box[0], box[3] - box[1], stroke=p.line, fill=p.panel)
    colours = p.series
    for point, cluster in zip(points, recorded["cluster"], strict=True):
        d.circle(*chart.at(*point), 2.2, fill=colours[cluster % len(colours)])
    for cluster, centre in enumerate(centres):
        x, y = chart.at(*centre)
        colour = colours[cluster % len(colours)]
        for reach, width, stroke in ((10, 8, p.panel), (8, 3.5, colour)):
            for sign in (-1, 1):
                ends = [(x - reach, y - reach * sign), (x + reach, y + reach * sign)]
                d.line(ends, colour=stroke, width=width)
    return d.render()


def logistic_regression(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the weights that were found, over the true ones."""
    p, truth, found = palette, recorded["truth"], recorded["found"]
    accuracy = f"test accuracy {recorded['accuracy']:.1%}"
    detail = f"{recorded['ranks']} ranks, {len(truth)} weights, {accuracy}"
    d = _start(p, "Weights of a logistic regression", detail)
    reach = max(map(abs, truth + found)) * 1.1
    axes = Axis(-reach, reach, "true weight"), Axis(-reach, reach, "")
    chart = Chart(d, (52, 58, 400, 224), *axes)
    chart.frame()
    chart.curve([(-reach, -reach), (reach, reach)], p.muted, width=1, dashed=True)
    for point in zip(truth, found, strict=True):
        d.circle(*chart.at(*point), 4.5, fill=p.blue, stroke=p.ground)
    d.text(62, 74, "found weight", size=12.5, colour=p.muted)
    return d.render()


def heat_inverse(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the true conductivity of the plate and the one that was found."""
    p, truth, found = palette, recorded["truth"], recorded["found"]
    detail = f"{recorded['ranks']} ranks, from noisy temperatures of 8 experiments"
    d = _start(p, "Heat conductivity of a plate", detail)
    reach = max(abs(value) for row in truth + found for value in row)
    cell = 13.5
    for place, (name, field) in enumerate((("true", truth), ("found", found))):
        left = 24 + place * 216
        d.text(left + 6 * cell, 64, name, size=13, anchor="middle")
        for j, row in enumerate(field):
            for i, value in enumerate(row):
                colour = p.orange if value > 0 else p.blue
                fill = mix(colour, p.panel, min(abs(value) / reach, 1) ** 0.8)
                x, y = left + i * cell, 72 + j * cell
                d.rect(x, y, cell + 0.3, cell + 0.3, fill=fill, radius=0)
    for place, (colour, name) in enumerate(((p.blue, "insulates"), (p.orange, "conducts"))):
        d.rect(132 + 100 * place, 252, 14, 14, fill=colour, radius=3)
        d.text(152 + 100 * place, 264, name, size=12.5, colour=p.muted)
    return d.render()


def infer(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return two images, with circles around the spots that were found."""
    p = palette
    images, spots = recorded["total"]
    detail = f"{recorded['ranks']} ranks, {spots:,} spots in {images} images, in order"
    d = _start(p, "Spots found in noisy images", detail)
    size = 190
    pairs = zip(recorded["images"], recorded["spots"], recorded["numbers"], strict=True)
    for place, (image, found, number) in enumerate(pairs):
        left, top = 20 + place * 210, 52
        content = base64.b64encode(_png(image)).decode()
        d.add(
            f'<image x="{left}" y="{top}" width="{size}" height="{size}" '
            f'style="image-rendering:pixelated" href="data:image/png;base64,{content}"/>'
        )
        for y, x in found:
            at = [left + (x + 0.5) * size / 48, top + (y + 0.5) * size / 48]
            d.add(
                f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="14" fill="none" '
                f'stroke="#f7cf4d" stroke-width="2"/>'
            )
        d.text(left + size / 2, top + size + 18, f"image {number}: {len(found)} spots", size=12.5,
               anchor="middle", colour=p.muted)  # fmt: skip
    return d.render()


def _png(image: Sequence[Sequence[float]]) -> bytes:
    """Return a grey image as PNG; not compressed, so that its bytes depend on no library."""
    rows = b"".join(
        b"\0" + bytes(min(255, max(0, round(70 + 150 * value))) for value in row) for row in image
    )
    header = struct.pack(">IIBBBBB", len(image[0]), len(image), 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
