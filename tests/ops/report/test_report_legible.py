"""That figures can be read, whether they compare few methods or many."""

from __future__ import annotations

from itertools import combinations

import pytest
from matplotlib import image
from matplotlib.colors import to_hex
from matplotlib.text import Text

from gapo_megatron.ops.report import style
from gapo_megatron.ops.report.arms import Comparison
from gapo_megatron.ops.report.costs import step_time
from gapo_megatron.ops.report.learning import OTHER
from gapo_megatron.ops.report.picture import draw_picture, write_picture
from gapo_megatron.ops.report.report import MAKERS
from gapo_megatron.ops.report.runs import read_run
from gapo_megatron.ops.report.series import NoData
from tests.report_setup import clocks_apart, compare, write_run, write_study

FEW = ("gapo", "gspo_asym", "dr_grpo")
MANY = (*FEW, "grpo", "gspo", "f_grpo", "f_gspo", "gapo_token", "cispo")


def draw_all(root, methods):
    """By name of the maker, the figures that a study of runs from models can fill."""
    comparison = write_study(root, methods, (0, 1))
    made = {}
    with style.style():
        for make in MAKERS.values():
            try:
                made[make.__name__] = make(comparison)
            except NoData:
                continue
    return {name: exhibit for name, exhibit in made.items() if exhibit.figure is not None}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return draw_all(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return draw_all(tmp_path_factory.mktemp("many"), MANY)


@pytest.mark.parametrize("number", ["few", "many"])
@pytest.mark.parametrize("name", [make.__name__ for make in MAKERS.values()])
def test_a_figure_can_be_read(request, number, name):
    """Axes named, a legend that fits, letters of 7 points, none outside or on another."""
    made = request.getfixturevalue(number)
    if name not in made:
        # Tables, and what takes a branch.
        assert name in ("summary", "others", "clip_sweep", "intervention")
        return
    check_readable(made[name], name)


@pytest.mark.parametrize("methods", [FEW, MANY])
def test_bars_of_both_sides_can_be_read(tmp_path, methods):
    options = {"num_steps": 2, "clocks": clocks_apart()}
    folders = [write_run(tmp_path / name, method=name, **options) for name in methods]
    with style.style():
        exhibit = step_time(compare(*folders))
    check_readable(exhibit, "step_time")
    (axis,) = exhibit.figure.axes
    assert len(axis.get_yticklabels()) == 2 * len(methods)


def test_a_single_bar_can_be_read(tmp_path):
    run = read_run(write_run(tmp_path / "gapo", method="gapo", num_steps=2))
    with style.style():
        exhibit = step_time(Comparison.of([run]))
    check_readable(exhibit, "step_time")


def check_readable(exhibit, name):
    figure = exhibit.figure
    assert figure.get_figwidth() == pytest.approx(3.3)
    assert figure.get_figheight() < 10  # a page
    with style.style():
        figure.draw_without_rendering()
    panels = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    names = [(axis.get_xlabel(), axis.get_ylabel()) for axis in panels]
    assert any(x for x, _ in names)
    assert all(y for _, y in names[::2])
    assert all(
        x or not axis.xaxis.get_tick_params()["labelbottom"]
        for axis, (x, _) in zip(panels, names, strict=True)
    )
    assert figure.legends or name == "solve_rates"  # whose colours have a scale
    assert len(exhibit.aid) > 40
    boxes = [(text.get_text(), text.get_window_extent()) for text in check_texts(figure)]
    # A pixel: boxes hold a little room around the letters.
    for (one, box), (another, other) in combinations(boxes, 2):
        assert not box.padded(-1).overlaps(other.padded(-1)), (one, another)


def check_texts(figure):
    """The texts of a figure that has been drawn: none outside of it, letters of 7 points."""
    texts = shown_texts(figure)
    for text in texts:
        assert text.get_fontsize() >= 7, text
        check_inside(figure, text)
    return texts


def check_inside(figure, artist):
    inside, box = figure.bbox.padded(1), artist.get_window_extent()
    assert inside.x0 <= box.x0 <= box.x1 <= inside.x1, artist
    assert inside.y0 <= box.y0 <= box.y1 <= inside.y1, artist


def shown_texts(figure):
    """All that have letters, but for those of ticks beyond the ends of an axis."""
    beyond = set()
    for axis in (one for panel in figure.axes for one in (panel.xaxis, panel.yaxis)):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-9 * (high - low)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low - slack <= tick.get_loc() <= high + slack:
                beyond |= {tick.label1, tick.label2}
    return [
        text
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible() and text not in beyond
    ]


@pytest.mark.parametrize("name", ["pass_at_k", "correlation", "by_c"])
def test_of_many_methods_each_stands_beside_the_first(many, name):
    """So that bands can be told apart: two colours in all, the first method's the same."""
    figure = many[name].figure
    axes = figure.axes
    per_row = {"pass_at_k": 2, "by_c": 3}.get(name, 1)
    assert len(axes) == per_row * 8
    titles = [title for a in axes if (title := a.get_title() or a.get_title(loc="left"))]
    assert titles == list(MANY[1:])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gapo", OTHER]
    for place, axis in enumerate(axes):
        handles, labels = axis.get_legend_handles_labels()
        lines = [getattr(one, "lines", [one])[0] for one in handles]  # error bars hold theirs
        colours = {
            label: to_hex(line.get_color()) for label, line in zip(labels, lines, strict=True)
        }
        both = {"gapo": "#0072b2", OTHER: "#d55e00"}
        if len(colours) == 1:  # ratios of tokens cannot be compared with gapo's of sequences
            del both["gapo"]
            assert (name, place % 3 > 0) == ("by_c", True)
        assert colours == both
    for column in range(per_row):
        by_labels = {}
        for axis in axes[column::per_row]:
            known = len(axis.get_legend_handles_labels()[1])
            by_labels.setdefault(known, set()).add(tuple(axis.get_ylim()))
        assert all(len(ranges) == 1 for ranges in by_labels.values())


def test_bars_end_where_shares_can_lie(many):
    rows = [row for row in many["by_c"].rows if row["quantity"] == "clip fraction"]
    assert min(row["low"] for row in rows) < 0  # of two seeds
    (bars, *_) = many["by_c"].figure.axes[0].collections
    assert min(bar[:, 1].min() for bar in bars.get_segments()) == pytest.approx(0)


def test_seven_looks_differ_and_so_they_do_without_colour():
    looks = [style.arm_style(place) for place in range(7)]
    assert len({look["color"] for look in looks}) == 7
    assert len({look["marker"] for look in looks}) == 7
    assert len({str(look["linestyle"]) for look in looks[:4]}) == 4
    more = [style.arm_style(place) for place in range(28)]
    assert len({(look["color"], str(look["linestyle"])) for look in more}) == 28


@pytest.mark.parametrize("length", [1, 4, 12, 28])
def test_a_legend_fits_and_the_figure_grows_by_it(length):
    with style.style():
        figure, (axis,) = style.panels(1)
        for place in range(6):
            axis.plot([0], label="m" * length, **style.arm_style(place))
        style.legend_below(figure, axis)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        plot = axis.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert plot.height > 0.6 * figure.dpi  # of a panel 1.45 inches high with its names


@pytest.mark.parametrize(("number", "kept"), [(300, 300), (301, 151), (1500, 301)])
def test_a_line_has_no_more_points_than_are_seen(number, kept):
    rows = [{"step": step} for step in range(number)]
    found = style.thinned(rows)
    assert len(found) == kept
    assert (found[0], found[-1]) == (rows[0], rows[-1])


# -- the picture of a run -------------------------------------------------------------------------


def lines_of(axis):
    return {line.get_label(): line for line in axis.get_lines()}


def test_the_picture_has_six_panels(tmp_path):
    study = write_study(tmp_path / "runs", FEW, (0, 1))
    runs = [run.folder for arm in study.curves for run in arm.runs]
    path = write_picture(runs, tmp_path / "out" / "report.png")
    assert image.imread(path).shape[2] == 4
    with style.style():
        figure = draw_picture(study)
        figure.draw_without_rendering()
        boxes = [axis.get_legend().get_window_extent() for axis in figure.axes]
    axes = figure.axes
    assert len(axes) == 6
    assert all(axis.get_title() and axis.get_xlabel() for axis in axes)
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width and box.y0 >= 0


@pytest.mark.parametrize("methods", [("gapo",), FEW])
def test_no_two_lines_of_a_panel_of_the_picture_look_alike(tmp_path, methods):
    folders = [write_run(tmp_path / method, method=method) for method in methods]
    with style.style():
        axes = draw_picture(compare(*folders)).axes
    held_out = {name: line for name, line in lines_of(axes[1]).items() if name[0] != "_"}
    assert [*held_out] == [f"{method} pass@{k}" for k in (1, 8) for method in methods]
    for axis in axes:
        lines = [line for line in axis.get_lines() if line.get_label()[0] != "_"]
        assert len({to_hex(line.get_color()) for line in lines}) == len(lines)
        looks = {(str(line._dash_pattern), line.get_marker()) for line in lines}
        # Curves by c go from dark to light; those of arms differ without colour, too.
        assert len(looks) == len(lines) or axis.get_legend().get_title().get_text()[:1] == "c"
    reward = lines_of(axes[0])  # an arm's colour is the same from panel to panel
    for method in methods:
        assert reward[method].get_color() == held_out[f"{method} pass@1"].get_color()
