"""Pictures of `mpistrat bench --plot`: units on the axes, quartiles, and comparable bars."""

import pytest

pytest.importorskip("matplotlib")

from mpistrat.bench.benchmark import SECONDS, Bars, Lines
from mpistrat.system.plots import new_figure, save_plot, styled

KIB, MIB = 2**10, 2**20


def drawn(picture, rows):
    with styled():
        figure = new_figure(6, 4)
        axes = figure.subplots()
        picture.draw(axes, rows)
        figure.draw_without_rendering()
    return axes


def labels_of(axis):
    return [each.get_text() for each in axis.get_ticklabels() if each.get_text()]


def test_lines_name_sizes_and_times_and_show_quartiles():
    rows = [
        {"num_bytes": size, "ours_s": time_s, "ours_s_quartiles": [time_s / 2, time_s * 2]}
        for size, time_s in ((8, 1e-5), (64 * KIB, 1e-4), (16 * MIB, 2e-2))
    ]
    axes = drawn(Lines("num_bytes", {"ours_s": "ours"}, "size of the array", SECONDS), rows)
    assert labels_of(axes.xaxis) == ["8 B", "64 KiB", "16 MiB"]
    assert {"10 us", "1 ms"} <= set(labels_of(axes.yaxis))
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((5e-6, 4e-2))


@pytest.mark.parametrize(("slowest", "scale"), [(0.5, "linear"), (0.01, "log")])
def test_bars_of_ratios_far_apart_begin_at_one(slowest, scale):
    rows = [{"what": "fast", "ratio": 2.0}, {"what": "slow", "ratio": slowest}]
    bars = Bars(lambda row: row["what"], {"ratio": "rate"}, "rate", line_at=1.0)
    axes = drawn(bars, rows)
    assert axes.get_xscale() == scale
    ends = [[each.get_x(), each.get_x() + each.get_width()] for each in axes.patches]
    start = 1.0 if scale == "log" else 0.0
    assert ends == [pytest.approx([start, 2.0]), pytest.approx([start, slowest])]
    assert labels_of(axes.yaxis) == ["fast", "slow"]


def test_a_bar_has_a_line_from_quartile_to_quartile_and_its_value():
    rows = [{"loop": "a", "step_s": 2e-3, "step_s_quartiles": [1e-3, 4e-3]}, {"loop": "b"}]
    axes = drawn(Bars(lambda row: row["loop"], {"step_s": "a step"}, SECONDS), rows)
    (line,) = axes.lines
    assert list(line.get_xdata()) == [1e-3, 4e-3]
    assert [each.get_text() for each in axes.texts] == ["2 ms"]


def test_a_picture_that_cannot_be_written(tmp_path):
    with styled():
        figure = new_figure(2, 2)
    with pytest.raises(ValueError, match="cannot be written"):
        save_plot(figure, tmp_path / "absent" / "out.png")
