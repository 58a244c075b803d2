from xml.etree import ElementTree

import pytest

from bench.svg import (
    HEIGHT,
    MAX_POINTS,
    PLOT_HEIGHT,
    BarPanel,
    LinePanel,
    decade_ticks,
    distribution_points,
    draw_figure,
    round_ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bars() -> BarPanel:
    return BarPanel(
        title="Speed <here>",
        y_label="tok/s & more",
        groups=["long, burst", "Poisson"],
        series={"static": [10.0, None], "continuous": [40.0, 20.0]},
    )


def lines(**fields: object) -> LinePanel:
    series = {"a": [(0.0, 0.0), (1.0, 50.0), (10.0, 100.0)]}
    return LinePanel(title="T", x_label="ms", y_label="%", **{"series": series, **fields})


def test_a_figure_is_well_formed_and_names_everything():
    root = ElementTree.fromstring(draw_figure("All 'of' it", [bars(), lines(), lines()]))
    assert root.tag == f"{SVG}svg"
    assert root.get("viewBox") == "0 0 960 680"  # two columns of 480, a heading, two rows of 320
    shown = texts(root)
    for text in ("All 'of' it", "Speed <here>", "tok/s & more", "long", "burst", "Poisson", "ms"):
        assert text in shown


def test_a_bar_is_as_high_as_its_value():
    root = ElementTree.fromstring(draw_figure("", [bars()]))
    titled = {
        title.text: float(rect.get("height", "nan"))
        for rect in root.iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None
    }
    # The axis ends at 40; a missing value has no bar.
    assert titled == {
        "long, burst, static: 10": pytest.approx(PLOT_HEIGHT / 4),
        "long, burst, continuous: 40": pytest.approx(PLOT_HEIGHT),
        "Poisson, continuous: 20": pytest.approx(PLOT_HEIGHT / 2),
    }


def test_a_line_runs_from_the_origin_to_the_end_of_the_axes():
    root = ElementTree.fromstring(draw_figure("", [lines()]))
    (polyline,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in polyline.get("points", "").split()]
    assert points == [(64, HEIGHT - 52), (104, HEIGHT - 52 - 105), (464, HEIGHT - 52 - 210)]


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show():
    root = ElementTree.fromstring(draw_figure("", [lines(log_x=True)]))
    (polyline,) = root.iter(f"{SVG}polyline")
    assert len(polyline.get("points", "").split()) == 2
    assert {"1", "2", "5", "10"} <= set(texts(root))


def test_a_line_of_many_points_is_thinned_and_keeps_its_end():
    points = [(float(number), 1.0) for number in range(10 * MAX_POINTS)]
    root = ElementTree.fromstring(draw_figure("", [lines(series={"a": points})]))
    (polyline,) = root.iter(f"{SVG}polyline")
    drawn = polyline.get("points", "").split()
    assert len(drawn) <= MAX_POINTS + 1
    assert float(drawn[-1].split(",")[0]) == pytest.approx(464, abs=1)


@pytest.mark.parametrize(
    "panel",
    [
        BarPanel(title="", y_label="", groups=[], series={}),
        BarPanel(title="", y_label="", groups=["a"], series={"b": [None]}),
        BarPanel(title="", y_label="", groups=["a"], series={"b": [0.0]}),
        lines(series={}),
        lines(series={"a": []}, log_x=True),
        lines(series={"a": [(3.0, 0.0)]}, log_x=True),
    ],
)
def test_nothing_to_draw_is_still_a_figure(panel: BarPanel | LinePanel):
    ElementTree.fromstring(draw_figure("", [panel]))


def test_no_panels_are_an_empty_figure():
    ElementTree.fromstring(draw_figure("nothing", []))


def test_notes_stand_below_the_panels():
    plain = ElementTree.fromstring(draw_figure("figure", []))
    noted = ElementTree.fromstring(draw_figure("figure", [], notes=["A: one", "B: <two>"]))
    assert int(noted.attrib["height"]) == int(plain.attrib["height"]) + 40
    texts = [element.text for element in noted.iter() if element.tag.endswith("text")]
    assert texts[-2:] == ["A: one", "B: <two>"]


@pytest.mark.parametrize(
    ("highest", "expected"),
    [
        (40, [0, 10, 20, 30, 40]),
        (41, [0, 10, 20, 30, 40, 50]),
        (0.7, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        (100, [0, 20, 40, 60, 80, 100]),
        (0, [0, 1]),
    ],
)
def test_ticks_are_round(highest: float, expected: list[float]):
    assert round_ticks(highest) == pytest.approx(expected)


def test_logarithmic_ticks_enclose_their_range():
    assert decade_ticks(3, 40) == pytest.approx([2, 5, 10, 20, 50])
    assert decade_ticks(1, 10) == pytest.approx([1, 2, 5, 10])
    assert decade_ticks(0.05, 0.05) == pytest.approx([0.05, 0.1])


def test_a_distribution_rises_to_all_of_its_values():
    assert distribution_points([4, 1, 2, 3]) == [(1, 25), (2, 50), (3, 75), (4, 100)]
    assert distribution_points([]) == []
