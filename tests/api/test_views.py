"""Views of results: useful texts, and HTML in which hostile names are text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from recspec import api
from recspec.api.views import MOST_ROWS, Section, View, figures

HOSTILE = [
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "</table><h1>",
    "\x1b[2J\r\n\u202e",
]
ALLOWED = {"div", "p", "b", "table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li"}


class Tags(HTMLParser):
    """Collects the tags of a page and the names of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_texts_wherever_they_stand(text: str) -> None:
    view = View(text, [Section(text, (text, "n"), [(text, 1.5), (None, True)]), figures(text, {text: [text]})], [text])
    page = Tags(view.to_html())
    assert set(page.tags) <= ALLOWED
    assert page.attributes <= {"style"}
    assert page.text.count(text) >= 7
    plain = view.to_text()
    assert not {"\x1b", "\r", "\u202e"} & set(plain)


def test_a_text_view_has_columns_and_a_long_one_says_how_much_is_left_out() -> None:
    section = Section("scores", ("name", "value"), [("a", 1), ("bb", 1234)])
    assert section.to_text() == "scores\n  name  value\n  a         1\n  bb    1,234"
    long = Section("", ("n",), [(row,) for row in range(MOST_ROWS + 5)])
    assert long.to_text().endswith("... 5 more rows")
    assert "5 more rows" in long.to_html()
    assert Section("nothing", ("a",), []).to_text() == "nothing\n  a"


def test_names_of_columns_and_titles_of_a_dataset_are_escaped(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    frame = {
        "user_id": [f"u{row % 9}" for row in range(90)],
        "item_id": [row % 10 for row in range(90)],
        name: [f"<b>{row % 3}" for row in range(90)],
    }
    data = api.prepare(frame, tmp_path / "<i>data", context_features=[name], progress=False)
    for view in (data, data.describe()):
        page = Tags(view._repr_html_())
        assert set(page.tags) <= ALLOWED
        assert name in page.text
        assert name in repr(view)


def test_models_evaluations_plans_and_listings_have_views(data: api.Data, model: api.Model) -> None:
    result = model.evaluate(data, protocol="full", bootstrap=20, slice="activity", against=model, progress=False)
    planned = api.train("ease", data, "nowhere", plan=True)
    views = {
        "Model: ease in ": model,
        "EvaluationResult of ease on test": result,
        "plan of ease": model.plan,
        "models": api.models(),
        "datasets": api.datasets(),
        "1 run in": api.runs(model.path),
    }
    for begins, view in views.items():
        assert repr(view).startswith(begins), begins
        assert set(Tags(view._repr_html_()).tags) <= ALLOWED
        assert view.to_html() == view._repr_html_()
    assert "ndcg@10" in repr(result)
    assert "95 %" in repr(result)
    assert "by activity" in repr(result)
    assert model.plan["method"].startswith("fitted in one go")
    assert planned["method"] == model.plan["method"]
    assert "ease" in api.models()
    assert "l2" in api.models().settings("ease").to_text()


def test_a_damaged_log_gives_an_empty_plan(tmp_path: Path) -> None:
    for damaged in ('{"event": "start", "choices": ' + "[" * 100_000, '"start"', '{"event": "start", "é'):
        (tmp_path / "log.jsonl").write_text(damaged, encoding="latin-1")
        assert len(api.model.Plan.of_log(tmp_path, "ease")) == 0
