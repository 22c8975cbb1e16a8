"""The page at `/`: alone, escaped, within its policy; in headless Chromium, what a person sees and does."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recspec.inference import Directory, Predictor, RecommendRequest, update_catalogue
from recspec.inference.requests import predict, recommend, similar
from recspec.loop import Journal, load_experiments
from recspec.serving.pages import SCRIPTS, page_text
from recspec.serving.showing import Showing
from tests.asking import asking, serving, sources
from tests.browser import Page, chromium

FOLDER = files("recspec.serving").joinpath("page")
TEXT = page_text()


# --- the file --------------------------------------------------------------------------------------------------------


def test_it_loads_nothing_from_elsewhere() -> None:
    assert len(TEXT.encode()) < 70_000
    assert not re.search(r"<link|<iframe|@import|url\(| src=\"", TEXT)
    assert set(re.findall(r"https?://[\w.]*", TEXT)) == set()


def test_every_file_of_the_folder_is_in_it() -> None:
    assert {each.name for each in FOLDER.iterdir()} == {"page.html", "page.css", *SCRIPTS}


def test_it_writes_text_and_never_markup() -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+=|setHTML", TEXT
    )
    assert not re.search(r"\sstyle=|javascript:", TEXT)


def test_every_field_has_a_label() -> None:
    fields = set(re.findall(r'<(?:input|select|textarea) id="([\w-]+)"', TEXT))
    assert fields == set(re.findall(r'<label for="([\w-]+)"', TEXT))
    assert len(fields) == 14


def policy(asked: Any, target: str) -> dict[str, str]:
    answer = asked("GET", target)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    rules = answer.headers["content-security-policy"].split("; ")
    return {name: rest for name, _, rest in (rule.partition(" ") for rule in rules)}


def test_its_policy_allows_what_stands_in_it_and_this_server_alone(shop_runs: dict[str, Path]) -> None:
    with asking(sources(ease=shop_runs["ease"]), token="secret") as asked:  # the page itself needs no token
        assert asked("GET", "/").body.decode() == TEXT
        rules, docs = policy(asked, "/"), policy(asked, "/docs")
        for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
            assert rules[name] == docs[name] == "'none'"
        assert rules["connect-src"] == "'self'"
        for name in ("script-src", "style-src"):
            assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[name])
        assert docs["script-src"] == "'none'"
        assert rules["img-src"] == "data:"


def test_pictures_of_other_hosts_are_allowed_only_where_they_are_asked_for(shop_runs: dict[str, Path]) -> None:
    with asking(sources(ease=shop_runs["ease"])) as asked:
        assert policy(asked, "/?images=on")["img-src"] == "data: https: http:"
        for other in ("/?images=off", "/?images", "/?image=on"):
            assert policy(asked, other)["img-src"] == "data:"


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    made = browser.new_page(viewport={"width": 1200, "height": 900})
    try:
        yield Page(made)
    finally:
        made.close()


@pytest.fixture(scope="module")
def address(shop_runs: dict[str, Path], browser: Any) -> Iterator[str]:  # noqa: ARG001  # no server without a browser
    with serving(sources(**shop_runs)) as addresses:
        yield addresses.http


SOLD = "`in_stock` == true"
"""The filter of every list of the page, as the catalogue has the column."""
GIF = base64.b64decode("R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==")
TITLES = "#lists .item h3"


def ready(page: Page, address: str) -> None:
    page.page.goto(address)
    page.wait("document.querySelector('#lists .item') && !document.querySelector('[aria-busy=true]')")


def settled(page: Page, status: str) -> None:
    page.wait(f"document.getElementById('status').textContent.includes({json.dumps(status)})")
    page.wait("!document.querySelector('[aria-busy=true]')")


def in_stock(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the shop's items that are: every fifth is not."""
    return [each for each in items if int(each["item"][1:]) % 5]


def ids(page: Page, selector: str = TITLES) -> list[str]:
    return page.texts(f"{selector} small")


def test_a_user_is_found_with_the_keyboard_and_gets_items_with_their_fields(
    page: Page, shop_runs: dict[str, Path], address: str
) -> None:
    by_hand = recommend(
        Predictor.open(shop_runs["ease"], device="cpu"),
        RecommendRequest(users=("c7",), explain=True, filter=SOLD),
        liked=20,
    )
    ready(page, address)
    page.page.focus("#user")
    page.page.keyboard.press("ArrowDown")
    page.wait("document.querySelectorAll('#user-list [role=option]').length == 8")  # the busiest, or what is typed
    page.page.keyboard.press("Escape")
    assert not page.page.is_visible("#user-list")
    page.page.fill("#user", "customer 7")
    page.wait("document.querySelector('#user-list [role=option] span')?.textContent == 'Customer 7 · c7'")
    assert page.page.get_attribute("#user", "aria-expanded") == "true"
    page.page.keyboard.press("ArrowDown")
    assert page.page.get_attribute("#user", "aria-activedescendant") == "user-0"
    page.page.keyboard.press("Enter")
    settled(page, "User c7 · Customer 7")
    assert ids(page) == [each["item"] for each in by_hand["items"]]
    assert page.texts(TITLES) == [f"{each['title']}{each['item']}" for each in by_hand["items"]]
    first = by_hand["items"][0]
    number = int(first["item"][1:])
    assert f"Category{'abc'[number % 3]}" in page.texts("#lists .item .values")[0]
    assert f"Price{number}.5" in page.texts("#lists .item .values")[0]
    assert len(page.texts("#history-items li")) == len(in_stock(by_hand["liked"])) > 0
    page.page.click("#lists .why summary >> nth=0")
    why = [event["title"] for event in in_stock(first["because"]["events"])]
    assert page.texts("#lists .item:first-child .why li") == why
    assert page.page.title() == "recspec: try a model"
    assert page.complaints == []


def test_it_begins_with_a_typical_user_and_with_what_is_in_stock(
    page: Page, shop_runs: dict[str, Path], address: str
) -> None:
    users = Directory(Predictor.open(shop_runs["ease"], device="cpu"), "user").find("", 30)
    counts = [each["count"] for each in users]
    ready(page, address)
    user = page.page.input_value("#user")
    (count,) = [each["count"] for each in users if each["user"] == user]
    assert abs(count - np.median(counts)) == np.abs(np.array(counts) - np.median(counts)).min()
    assert page.page.is_visible("text=A user of median activity, to begin with.")
    assert page.texts("#sold-note") == ["Only items with in_stock == true are shown."]
    for where in (TITLES, "#history-items li"):
        assert page.texts(where)
        assert not [each for each in page.texts(where) if re.search(r" (0|5|10|15|20)(p\d+)?$", each)]
    page.page.fill("#basket-item", "1>")  # in every title
    page.wait("document.querySelectorAll('#basket-item-list [role=option]').length > 2")
    assert in_stock([{"item": each.rpartition(" ")[2]} for each in page.texts("#basket-item-list span")])
    page.page.fill("#basket-item", "p15")
    page.wait("document.querySelector('#basket-item-list')?.textContent == 'No such item.'")
    page.page.fill("#user", "c8")
    page.page.keyboard.press("Enter")
    settled(page, "User c8")
    assert not page.page.is_visible("text=A user of median activity, to begin with.")
    assert page.complaints == []


def test_scores_that_are_no_probabilities_are_ranks_alone(page: Page, address: str) -> None:
    ready(page, address + "/#user=c3")
    count = len(page.texts("#lists .item"))
    assert page.texts("#lists .rank") == [str(place + 1) for place in range(count)]
    assert page.page.locator("#lists .item > .body > .score").count() == 0
    assert "%" not in " ".join(page.texts("#lists"))
    assert "In the order of the model’s scores, which are no probabilities." in page.texts("#lists .note")


@pytest.mark.slow
def test_filters_are_made_from_columns(page: Page, address: str) -> None:
    ready(page, address + "/#user=c1")
    page.page.click("#filter-box summary")
    page.page.get_by_label("b", exact=True).check()
    page.page.get_by_label("Price to").fill("15")
    assert page.page.get_by_label("In stock").count() == 0  # no choice: the filter stands
    page.page.get_by_label("eco", exact=True).check()
    page.page.get_by_label("Added from").fill("2026-01-02")
    page.page.keyboard.press("Enter")
    expected = f"{SOLD} and category in ('b') and price <= 15 and tags contains 'eco' and added >= '2026-01-02'"
    page.wait(f"document.getElementById('filter-text').textContent == {json.dumps('filter: ' + expected)}")
    page.wait("!document.querySelector('[aria-busy=true]')")
    shown = [int(each[1:]) for each in ids(page)]
    assert shown
    assert all(item % 3 == 1 and item <= 14 and item % 5 for item in shown)
    page.page.fill("#expression", "price >")
    page.page.keyboard.press("Enter")
    page.wait("document.getElementById('problem').textContent.includes('filter')")
    page.page.click("#clear-filters")
    page.wait(
        "document.getElementById('problem').textContent == '' && document.querySelectorAll('#lists .item').length > 7"
    )
    assert page.complaints == []


@pytest.mark.slow
def test_a_basket_answers_in_place_of_the_history(page: Page, shop_runs: dict[str, Path], address: str) -> None:
    ready(page, address + "/#user=c2")
    page.page.click("#lists .item >> nth=1 >> text=Add to basket")
    settled(page, "by the basket")
    chosen = page.texts("#basket li span")
    page.page.fill("#basket-item", "p11")
    page.wait("document.querySelector('#basket-item-list span')?.textContent.endsWith('p11')")
    page.page.keyboard.press("Enter")
    page.wait("document.querySelectorAll('#basket li').length == 2")
    page.page.fill("#user", "")
    page.page.click("#ask button.main")
    page.wait("document.getElementById('status').textContent.startsWith('10 items, by the basket')")
    basket = (chosen[0].rpartition(" ")[2], "11")
    items = tuple(f"p{number}" for number in basket)
    expected = recommend(Predictor.open(shop_runs["ease"], device="cpu"), RecommendRequest(items=items, filter=SOLD))[
        "items"
    ]
    page.wait("!document.querySelector('[aria-busy=true]')")
    assert ids(page) == [each["item"] for each in expected]
    assert page.page.url.endswith("item=".join(["", *(f"{item}&" for item in items)]).rstrip("&").removeprefix("item="))
    page.page.click("#basket button >> nth=0")
    page.wait("document.querySelectorAll('#basket li').length == 1")
    assert page.page.evaluate("document.activeElement.closest('#basket') !== null")  # the focus is not lost
    assert page.complaints == []


@pytest.mark.slow
def test_similar_items_open_in_a_dialog_that_escape_closes(
    page: Page, shop_runs: dict[str, Path], address: str
) -> None:
    ready(page, address + "/#user=c2")
    item = ids(page)[0]
    page.page.focus("#lists .item .foot button")
    page.page.keyboard.press("Enter")
    page.wait("document.querySelectorAll('#similar .item').length == 10")
    asked = RecommendRequest(items=(item,), filter=SOLD)
    found = similar(Predictor.open(shop_runs["ease"], device="cpu"), asked)["items"]
    assert ids(page, "#similar .item h3") == [each["item"] for each in found]
    page.page.keyboard.press("Escape")
    assert not page.page.is_visible("#similar")
    assert page.page.evaluate("document.activeElement.closest('#lists') !== null")  # back where it was
    assert page.complaints == []


@pytest.mark.slow
def test_two_models_stand_side_by_side(page: Page, shop_runs: dict[str, Path], address: str) -> None:
    ready(page, address + "/#model=ease&user=c4")
    page.page.select_option("#beside", "ials")
    page.wait("document.querySelectorAll('#lists .list').length == 2")
    for place, name in enumerate(("ease", "ials"), start=1):
        expected = recommend(
            Predictor.open(shop_runs[name], device="cpu"), RecommendRequest(users=("c4",), filter=SOLD)
        )["items"]
        assert ids(page, f"#lists .list:nth-child({place}) h3") == [each["item"] for each in expected]
    left, right = (set(ids(page, f"#lists .list:nth-child({place}) h3")) for place in (1, 2))
    assert f"{len(left & right)} of them in both lists" in page.texts("#status")[0]
    assert sum("also number" in text for text in page.texts("#lists .sign")) == 2 * len(left & right)
    assert page.complaints == []


def test_an_unknown_user_is_flagged_and_its_text_is_no_markup(page: Page, address: str) -> None:
    ready(page, address)
    page.page.fill("#user", "<script>nobody")
    page.page.keyboard.press("Enter")
    settled(page, "unknown user")
    assert "User <script>nobody unknown user 10 items, by popularity" in page.texts("#status")[0]
    assert page.complaints == []


@pytest.mark.slow
def test_a_situation_is_asked_for_and_probabilities_are_shown(
    page: Page, shop_runs: dict[str, Path], address: str
) -> None:
    ready(page, address + "/#model=clicks&user=c5")
    assert page.page.is_visible("text=In which situation?")
    page.page.locator("#context-fields").get_by_label("Device").select_option(label="phone")
    page.page.locator("#context-fields").get_by_label("Hour").fill("2")
    page.page.keyboard.press("Enter")
    context = {"device": "phone", "hour": 2}
    expected = recommend(
        Predictor.open(shop_runs["clicks"], device="cpu"), RecommendRequest(users=("c5",), context=context, filter=SOLD)
    )["items"]
    page.wait(f"document.querySelector('#lists .score b').textContent == '{100 * expected[0]['probability']:.3g} %'")
    shown = [float(text.removesuffix(" %")) / 100 for text in page.texts("#lists .score b")]
    assert shown == pytest.approx([each["probability"] for each in expected], rel=0.01)
    assert page.complaints == []


@pytest.mark.slow
def test_rows_are_scored_from_controls_and_from_what_is_pasted(
    page: Page, shop_runs: dict[str, Path], address: str
) -> None:
    predictor = Predictor.open(shop_runs["clicks"], device="cpu")
    ready(page, address + "/#model=clicks&user=c5")
    page.page.click("#rows > summary")
    page.page.click("#many > summary")
    page.wait("document.getElementById('text').value")
    row = json.loads(page.page.input_value("#text"))[0]
    assert row["device"] in ("phone", "laptop")
    assert isinstance(row["hour"], (int, float))
    page.page.click("text=Score this row")
    page.wait("document.querySelectorAll('#scores tbody tr').length == 1")
    probability = predict(predictor, [row]).values[0]
    assert float(page.texts("#scores td:nth-child(2)")[0]) == pytest.approx(probability, rel=1e-3)
    rows = [{**row, "customer": "c3"}, {**row, "customer": "nobody"}]
    for written in (
        json.dumps(rows),
        "\n".join([",".join(row), *(",".join(f'"{value}"' for value in each.values()) for each in rows)]),
    ):
        page.page.fill("#text", written)
        page.page.click("text=Score these rows")
        page.wait("document.querySelectorAll('#scores tbody tr').length == 2")
        found = predict(predictor, rows)
        shown = [float(each) for each in page.texts("#scores td:nth-child(2)")]
        assert shown == pytest.approx(list(found.values), rel=1e-3)
        assert page.texts("#row-notes li") == list(found.notes)
    for written, told in (
        ("[{]", "The rows are not JSON"),
        ('[{"hour": {}}]', "row 1 (rows[0].hour) is an object"),
        ("a,b\n1", "Row 1 has 1 values for 2 columns."),
        ("a,b", "CSV needs a line with the names"),
    ):
        page.page.fill("#text", written)
        page.page.click("text=Score these rows")
        page.wait(f"document.getElementById('problem').textContent.includes({json.dumps(told)})")
    assert page.complaints == []


@pytest.mark.slow
def test_pictures_of_other_hosts_wait_for_the_user(page: Page, address: str) -> None:
    ready(page, address + "/#user=c6")
    page.wait("document.querySelector('#lists .picture img')")
    assert not page.page.evaluate("[...document.images].some(each => !each.src.startsWith('data:'))")
    assert "pictures.example" in page.texts("#pictures-text")[0]
    page.page.goto(address + "/?images=on#user=c6")  # an address alone allows nothing
    page.wait("document.querySelector('#lists .item')")
    assert not page.page.evaluate("[...document.images].some(each => !each.src.startsWith('data:'))")
    assert not any("pictures.example" in each for each in page.requests)
    page.page.route("https://pictures.example/**", lambda route: route.fulfill(content_type="image/gif", body=GIF))
    page.page.click("#pictures-button")
    page.wait("location.search == '?images=on' && document.querySelector('#lists .item')")
    page.wait("[...document.images].some(each => each.src.startsWith('https://pictures.example/'))")
    assert page.page.evaluate("[...document.images].every(each => each.referrerPolicy == 'no-referrer')")
    page.page.click("#pictures-button")
    page.wait("location.search == '' && document.querySelector('#lists .item')")
    assert not page.page.evaluate("[...document.images].some(each => !each.src.startsWith('data:'))")


def test_an_event_changes_the_next_answer_and_the_live_panel(
    page: Page, shop_runs: dict[str, Path], tmp_path: Path
) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(
        "{name: a-b, start: 2020-01-01, users: 200, variants: [{name: one, share: 0.5}, {name: two, share: 0.5}], "
        "metrics: [{name: orders, event: purchase}]}"
    )
    showing = Showing(experiments=load_experiments(experiment))
    with serving(
        sources(ease=shop_runs["ease"]), journal=f"sqlite:///{tmp_path / 'journal.db'}", showing=showing
    ) as addresses:
        ready(page, addresses.http + "/#user=c7")
        page.wait("document.querySelector('#live-tiles dd')")
        tiles = " ".join(page.texts("#live-tiles > div"))
        assert "Newest eventnone yet" in tiles
        assert "Model easeas trainedmade " in tiles
        assert page.texts("#experiments tbody th") == ["a-bended"]
        assert page.texts("#experiments tbody li") == ["one 50 %, 0 users", "two 50 %, 0 users"]
        assert "nobody" in page.texts("#experiments tbody td")[1]
        first, *others = ids(page)
        page.page.click("#lists .item >> nth=0 >> text=Send event")
        page.wait("document.getElementById('act-status').textContent.includes('The answer has changed: ')")
        assert first not in ids(page)
        assert set(ids(page)) >= set(others)
        signs = [item.split("number ")[-1] for item in page.texts("#lists .sign")]
        assert signs.count("new") == len(ids(page)) - len(others)
        page.wait("document.getElementById('live-tiles').textContent.includes('1 accepted')")
        page.page.fill("#act-item", "p11")
        page.wait("document.querySelector('#act-item-list span')?.textContent.endsWith('p11')")
        page.page.keyboard.press("Enter")
        page.page.keyboard.press("Enter")
        page.wait("document.getElementById('live-tiles').textContent.includes('2 accepted')")
        assert page.page.get_attribute("#act-type", "id") == "act-type"
        assert page.complaints == []
        with Journal(f"sqlite:///{tmp_path / 'journal.db'}", read_only=True) as journal:
            stored = pa.Table.from_batches([*journal.events()]).select(["subject", "type", "item"]).to_pylist()
        assert stored == [{"subject": "c7", "type": "purchase", "item": each} for each in (first, "p11")]


def test_a_blocked_item_leaves_the_page_while_it_is_open(
    page: Page, shop_runs: dict[str, Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(shop_runs["ease"], tmp_path / "ease"))
    acted = recommend(Predictor.open(run, device="cpu"), RecommendRequest(users=("c2",)), liked=20)["liked"]
    with serving(sources(ease=run), watch=0.2) as addresses:
        ready(page, addresses.http + "/#user=c2")
        blocked = next(each for each in ids(page) if len(each) == 3)  # p10 or higher, which is part of no other id
        liked = page.texts("#history-items li")
        update_catalogue(run, block=[blocked, in_stock(acted)[0]["item"]])
        page.wait(f"![...document.querySelectorAll('{TITLES} small')].some(each => each.textContent == '{blocked}')")
        assert page.texts("#history-items li") == liked[1:]
        page.page.fill("#basket-item", blocked)
        page.wait("document.querySelector('#basket-item-list')?.textContent == 'No such item.'")
        assert page.complaints == []


@pytest.mark.slow
def test_a_token_is_asked_for_once_and_kept_in_the_tab(page: Page, shop_runs: dict[str, Path]) -> None:
    (shop_runs["ease"] / "report.html").write_text("<title>report</title><p>of the run", encoding="utf-8")
    try:
        with serving(sources(ease=shop_runs["ease"]), token="secret") as addresses:
            page.page.goto(addresses.http)
            page.page.fill("#token", "wrong")
            page.page.keyboard.press("Enter")
            page.wait("document.getElementById('problem').textContent.includes('does not know this token')")
            page.page.fill("#token", "secret")
            page.page.keyboard.press("Enter")
            page.wait("document.querySelector('#lists .item')")
            assert page.page.input_value("#token") == ""
            page.page.reload()
            page.wait("document.querySelector('#lists .item')")
            with page.page.expect_popup() as opened:  # a link of its own, without the token
                page.page.click("#reports a")
            opened.value.wait_for_load_state()
            assert (opened.value.title(), opened.value.inner_text("p")) == ("report", "of the run")
            opened.value.close()
            page.page.click("text=Forget the token")
            assert page.page.is_visible("#token")
            page.page.reload()
            page.wait("!document.getElementById('sign-in').hidden")
            assert page.complaints == []
    finally:
        (shop_runs["ease"] / "report.html").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_the_window_and_every_control_has_a_name(browser: Any, address: str, width: int) -> None:
    page = Page(browser.new_page(viewport={"width": width, "height": 800}))
    ready(page, address + "/#model=clicks&user=c5")
    page.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.page.evaluate("""[...document.querySelectorAll('input, select, textarea, button, summary, a')]
      .filter(each => !(each.labels?.length || each.getAttribute('aria-label') || each.textContent.trim()))
      .map(each => each.outerHTML)""")
    assert unnamed == []
    assert page.page.locator("main").count() == page.page.locator("h1").count() == 1
    page.page.close()


@pytest.mark.slow
def test_every_control_is_reached_with_the_tab_key_and_none_holds_it(page: Page, address: str) -> None:
    ready(page, address + "/#user=c2")
    reached = list[str]()
    for _ in range(60):
        page.page.keyboard.press("Tab")
        reached.append(page.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        if reached.count(reached[0]) == 2:
            break
    for name in ("model", "beside", "user", "basket-item", "k", "diversity", "seen", "explain"):
        assert name in reached
    assert reached.index("user") < reached.index("k") < reached.index("Recommend") < reached.index("Similar items")
    outline = page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
