"""Charts: SVG in the page's colours, without styles, with ids of its own."""

import matplotlib
import pytest
from markupsafe import Markup

from recspec.report import charts
from recspec.report.charts import Series
from tests.report.pages import HOSTILE, Page

DRAWN = {
    "lines": lambda name: charts.lines(
        "c",
        [Series(name, [0, 1, 2], [3, 1, 2], ["a", "b", "c"]), Series("two", [0, 1], [1, 2])],
        title=name,
        x="epoch",
        y="loss",
        marks={name: 1.0},
    ),
    "columns": lambda name: charts.columns("c", [1, 2, 4, 8], [3, 0, 1], title=name, x="events", y="users", log=True),
    "grouped": lambda name: charts.grouped(
        "c", ["top", "tail"], {name: [1, 2], "two": [3, 4]}, title=name, x="x", y="y", level=2
    ),
    "ranges": lambda name: charts.ranges(
        "c", ["1", "2 to 3"], [0.1, -0.2], [0.0, -0.3], [0.2, -0.1], title=name, x="x", y="y"
    ),
    "reliability": lambda name: charts.reliability(
        "c", [Series(name, [0.1, 0.9], [0.2, 0.8], ["low", "high"])], title=name
    ),
}


@pytest.fixture(params=[*DRAWN])
def drawn(request: pytest.FixtureRequest) -> Markup:
    made: Markup = DRAWN[request.param](HOSTILE[0])
    return made


def test_a_chart_is_named_and_has_no_styles_and_no_colours_of_its_own(drawn: Markup) -> None:
    page = Page(drawn)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"chart-c-title", "chart-c-desc"} <= set(ids)
    assert not page.all("script")
    for name, attributes in page.elements:
        assert name not in ("style", "metadata")
        assert "style" not in attributes
        for key in ("fill", "stroke"):
            value = attributes.get(key) or "none"
            assert value == "none" or value.startswith(("var(--", "url(#chart-c-")) or value == "#000000", (name, value)


def test_marks_tell_their_numbers() -> None:
    page = Page(DRAWN["lines"]("one"))
    assert [*page.inside["title"]][1:] == ["a", "b", "c"]
    assert Page(DRAWN["grouped"]("one")).inside["title"][1:] == [
        "one, top: 1",
        "one, tail: 2",
        "two, top: 3",
        "two, tail: 4",
    ]


def test_text_of_a_chart_follows_the_page_s_colours() -> None:
    for attributes in Page(DRAWN["columns"]("one")).all("text"):
        assert (attributes.get("fill") or "").startswith("var(--")


def test_drawing_leaves_the_settings_of_matplotlib_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 31.0)
    before = dict(matplotlib.rcParams)
    made = DRAWN["columns"]("one")
    assert dict(matplotlib.rcParams) == before
    assert made == DRAWN["columns"]("one"), "the same chart is the same text"
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 10.0)
    assert made == DRAWN["columns"]("one"), "whatever the caller's settings"


def test_small_charts_of_tables_by_hand() -> None:
    assert 'width="25.0"' in charts.bar(0.25)
    assert 'width="100.0"' in charts.bar(7.0)
    assert 'cx="100.0"' in charts.whisker(0.4, 0.5, 0.6, 0.0, 1.0)
    assert "circle" not in charts.whisker(1.4, 1.5, 1.6, 0.0, 1.0), "beyond the scale nothing is drawn"
