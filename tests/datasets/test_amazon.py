"""Amazon's reviews: every rule on a few reviews worked by hand, each release's files, and the published records."""

from __future__ import annotations

import gzip
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import ValidationError

from recspec.base.errors import DataError, RecspecError, SettingsError, SpecError
from recspec.base.files import archives
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import PrepareContext, backend, histories, interaction_rows
from recspec.data.prepare.prepared import Prepared
from recspec.data.storage import open_split, tfrecord, transcode
from recspec.data.storage.check import check
from recspec.datasets import amazon, reviews
from recspec.datasets.amazon import Settings
from recspec.feature_spec import FeatureSpec
from tests import made_up_amazon
from tests.made_up_amazon import DAY, START, days, write_meta, write_reviews

Rows = list[dict[str, Any]]

PUBLISHED = {"valid": False, "reject_seen": False}
"""With the defaults, SIM's own preparation."""


def prepare(raw: Path, out: Path, engine: str = "duckdb", **settings: object) -> Prepared:
    return amazon.prepare(PrepareContext(raw, out, threads=1, engine=engine), Settings.model_validate(settings))


def rows_of(spec: FeatureSpec, split: str) -> Rows:
    """Every row of a split as it is stored."""
    columns = open_split(spec, split).read(0, 10**9)
    values = {name: column.tolist() for name, column in columns.items()}
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def raw_rows(spec: FeatureSpec, split: str) -> Rows:
    """Every row of a split with raw values for ids."""
    encoders = Encoders.load(spec.folder)
    names = {name: spec.vocabulary(name) for name, feature in spec.features.items() if feature.is_categorical}
    values = {
        vocabulary: encoders.vocabularies[vocabulary].values.to_pylist() for vocabulary in dict.fromkeys(names.values())
    }

    def raw(name: str, value: Any) -> Any:
        if name not in names:
            return value
        found = values[names[name]]
        return [found[part - 1] for part in value] if isinstance(value, list) else found[value - 1]

    return [{name: raw(name, value) for name, value in row.items()} for row in rows_of(spec, split)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "prepare.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# --- a few reviews by hand -------------------------------------------------------------------------------------------

REVIEWS = [
    ("ann", "pen", START + 2 * DAY),
    ("ann", "cup", START),
    ("ann", "bag", START + 2 * DAY),
    ("ann", "cup", START + 5 * DAY),
    ("ann", "hat", START + 9 * DAY),
    ("bob", "pen", START),
    ("bob", "hat", START + DAY),
    ("bob", "axe", START + 3 * DAY),
    ("cid", "mug", START),
]
"""Ann's bag and pen are of one day, so bag comes first; her cup stands twice; cid has one review alone."""
META: Sequence[Mapping[str, Any]] = [
    {"asin": "pen", "title": "Pen, it's", "categories": [["Office", "Pens"], ["Gifts", "Cheap"]], "brand": "Bic"},
    {"asin": "cup", "categories": [["Home"]], "title": ""},
    {"asin": "bag", "categories": [[]]},
    {"asin": "hat", "related": {"also_bought": ["x", "y"], "bought_together": []}, "categories": [["Wear", "Hats"]]},
    {"asin": "axe", "brand": " "},
    {"asin": "zoo", "categories": [["Nobody's"]]},
    {"asin": "hat", "categories": [["Repeated"]]},
]
BY_HAND: Mapping[str, object] = {"min_reviews": 1, **PUBLISHED}


def by_hand(folder: Path, engine: str = "duckdb", name: str = "out", **settings: object) -> Prepared:
    raw = folder / "raw"
    if not raw.exists():
        write_reviews(raw / "reviews_Toys.json.gz", REVIEWS)
        write_meta(raw / "meta_Toys.json.gz", META)
    return prepare(raw, folder / name, engine, **{**BY_HAND, **settings})


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """The reviews by hand, prepared once for all that only look."""
    return by_hand(tmp_path_factory.mktemp("hand")).spec


def test_train_rows_are_the_prefixes_each_with_its_negative(hand: FeatureSpec) -> None:
    check(hand)
    rows = raw_rows(hand, "train")
    positives = [(row["user_id"], row["history_item_id"], row["item_id"]) for row in rows[::2]]
    assert positives == [
        ("ann", ["cup"], "bag"),
        ("ann", ["cup", "bag"], "pen"),
        ("ann", ["cup", "bag", "pen"], "cup"),
        ("bob", ["pen"], "hat"),
    ]
    assert [row["label"] for row in rows] == [1, 0] * 4
    for positive, negative in zip(rows[::2], rows[1::2], strict=True):
        differ = {name for name in positive if positive[name] != negative[name]}
        assert differ <= {"label", "item_id", "category"}
    assert hand.splits == ("train", "test")
    rows = raw_rows(hand, "test")  # the last review, with all before it
    assert [(row["user_id"], row["history_item_id"], row["item_id"]) for row in rows[::2]] == [
        ("ann", ["cup", "bag", "pen", "cup"], "hat"),
        ("bob", ["pen", "hat"], "axe"),
    ]
    assert [row["label"] for row in rows] == [1, 0, 1, 0]
    assert rows[0]["history_gap"] == pytest.approx([math.log(1 + days) for days in (9, 7, 7, 4)])


def test_valid_is_the_last_review_but_one_unless_it_trains(tmp_path: Path) -> None:
    result = by_hand(tmp_path, valid=True, history=3)
    assert result.summary["rows"] == {"train": 4, "valid": 4, "test": 4}
    row = raw_rows(result.spec, "test")[0]
    assert row["history_item_id"] == ["bag", "pen", "cup"], "the latest events are kept"
    assert len(row["history_gap"]) == len(row["negative_history_item_id"]) == 3
    rows = raw_rows(result.spec, "valid")
    assert [(row["user_id"], row["history_item_id"], row["item_id"]) for row in rows[::2]] == [
        ("ann", ["cup", "bag", "pen"], "cup"),
        ("bob", ["pen"], "hat"),
    ]


@pytest.mark.parametrize(
    ("settings", "targets"),
    [
        ({"min_history": 2}, ["pen", "cup"]),
        ({"prefixes": "last"}, ["cup", "hat"]),
        ({"min_history": 0}, ["cup", "bag", "pen", "cup", "pen", "hat", "mug"]),
    ],
)
def test_which_prefixes_are_rows(settings: dict[str, object], targets: list[str], tmp_path: Path) -> None:
    rows = raw_rows(by_hand(tmp_path, **settings).spec, "train")
    assert [row["item_id"] for row in rows[::2]] == targets


def test_the_category_is_the_last_of_the_first_path(tmp_path: Path) -> None:
    result = by_hand(tmp_path, brand=True, categories="path")
    items = pq.read_table(tmp_path / "out" / "items.parquet").to_pylist()
    encoders = Encoders.load(tmp_path / "out")
    names = encoders.vocabularies["item_id"].values.to_pylist()
    told_of = [(item["category_text"], item["brand_text"], item["title"]) for item in items]
    assert dict(zip(names, told_of, strict=True)) == {
        "axe": ("no_category", "no_brand", None),
        "bag": ("no_category", "no_brand", None),
        "cup": ("Home", "no_brand", None),
        "hat": ("Hats", "no_brand", None),
        "mug": ("no_category", "no_brand", None),
        "pen": ("Pens", "Bic", "Pen, it's"),
    }
    assert encoders.vocabularies["category"].values.to_pylist() == ["Hats", "Home", "Pens", "no_category"]
    row = raw_rows(result.spec, "test")[0]
    assert row["history_category"] == ["Home", "no_category", "Pens", "Home"]
    assert row["history_brand"] == ["no_brand", "no_brand", "Bic", "no_brand"]
    assert row["category_path"] == ["Wear", "Hats"]
    assert result.spec.features["category_path"].is_list
    told = {"items_described": 5, "items_without_category": 3, "repeated_lines_about_items": 1}
    assert result.summary.items() >= {**told, "metadata": "meta_Toys.json.gz", "category": "Toys"}.items()


def test_negatives_have_their_own_categories_and_stand_for_each_event(hand: FeatureSpec) -> None:
    category = {"pen": "Pens", "cup": "Home", "hat": "Hats"}
    seen = set()
    for split in hand.splits:
        for row in raw_rows(hand, split):
            for prefix in ("", "history_", "negative_history_"):
                items, found = row[f"{prefix}item_id"], row[f"{prefix}category"]
                pairs = zip(items, found, strict=True) if prefix else [(items, found)]
                assert all(category.get(item, "no_category") == name for item, name in pairs)
            assert len(row["negative_history_item_id"]) == len(row["history_item_id"])
            seen.update(row["negative_history_item_id"])
    assert len(seen) > 2


def test_ids_count_from_one_in_sorted_order_and_cardinality_is_one_more(hand: FeatureSpec) -> None:
    assert Encoders.load(hand.folder).vocabularies["user_id"].values.to_pylist() == ["ann", "bob", "cid"]
    assert (hand.features["user_id"].cardinality, hand.features["item_id"].cardinality) == (4, 7)
    assert hand.features["history_item_id"].length == 100
    assert hand.vocabulary("history_item_id") == hand.vocabulary("negative_history_item_id") == "item_id"
    encoders = Encoders.load(hand.folder).encoders
    assert (encoders["user_id"].column, encoders["item_id"].column) == ("reviewerID", "asin")  # type: ignore[union-attr]


# --- filters ---------------------------------------------------------------------------------------------------------


def test_users_with_nineteen_reviews_are_dropped_and_items_are_not(tmp_path: Path) -> None:
    many = [f"i{number:02d}" for number in range(20)]
    write_reviews(tmp_path / "raw" / "reviews_A.json", [*days("nineteen", [*many[:18], "rare"]), *days("twenty", many)])
    result = prepare(tmp_path / "raw", tmp_path / "out", **PUBLISHED)
    assert (result.summary["users"], result.summary["items"]) == (1, 20)
    assert result.summary["of_users_with_too_few_dropped"] == 19
    assert result.summary["rows"] == {"train": 2 * 18, "valid": 0, "test": 2}  # 19 before test give 18 prefixes


def test_repeats_count_unless_they_are_dropped(tmp_path: Path) -> None:
    assert by_hand(tmp_path).summary["interactions"] == 9
    dropped = by_hand(tmp_path, name="once", repeats="drop")
    assert (dropped.summary["interactions"], dropped.summary["repeats_dropped"]) == (8, 1)
    assert raw_rows(dropped.spec, "test")[0]["history_item_id"] == ["cup", "bag", "pen"]


def test_items_and_stars_may_be_filtered_too(tmp_path: Path) -> None:
    kept = by_hand(tmp_path, min_item_reviews=2, min_reviews=2)
    assert Encoders.load(kept.spec.folder).vocabularies["item_id"].values.to_pylist() == ["cup", "hat", "pen"]
    assert kept.summary["of_items_with_too_few_dropped"] == 3  # bag, axe, mug
    assert kept.summary["of_users_with_too_few_dropped"] == 0
    write_reviews(tmp_path / "stars" / "B.jsonl", REVIEWS, release=2023)
    lines = (tmp_path / "stars" / "B.jsonl").read_text().splitlines()
    lines[4] = lines[4].replace('"rating": 5.0', '"rating": 2')
    (tmp_path / "stars" / "B.jsonl").write_text("\n".join(lines))
    few = prepare(tmp_path / "stars", tmp_path / "few", **BY_HAND, min_rating=3)
    assert (few.summary["reviews"], few.summary["reviews_of_few_stars_dropped"]) == (9, 1)


def test_no_user_left_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        by_hand(tmp_path, min_reviews=20)
    expected = (
        "no review is left: of 9 all that other filters keep are of users with fewer than 20; set min_reviews lower"
    )
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()


# --- negatives -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of made-up reviews: 60 users, 40 items, 1500 reviews."""
    return made_up_amazon.write(tmp_path_factory.mktemp("toys"))


def test_published_negatives_are_the_items_of_random_reviews(toys: Path, tmp_path: Path) -> None:
    """Whether the user has seen them or not, in proportion to the reviews that count."""
    spec = prepare(toys, tmp_path / "out", **PUBLISHED, min_reviews=5).spec
    drawn: Counter[int] = Counter()
    for row in rows_of(spec, "train"):
        drawn.update(row["negative_history_item_id"])
    taken = Counter(item for _, item, _ in made_up_amazon.made_up(60, 40, 1500))
    expected = np.array([count for _, count in sorted(taken.items())]) / taken.total()
    shares = np.array([drawn[number] for number in range(1, len(taken) + 1)]) / drawn.total()
    assert drawn.total() > 20_000
    assert np.abs(shares - expected).max() < 0.01
    assert np.abs(shares - 1 / len(taken)).max() > 0.03  # far from uniform


def test_by_default_no_negative_is_what_the_user_reviewed(tmp_path: Path) -> None:
    write_reviews(tmp_path / "reviews_T.json.gz", made_up_amazon.made_up(50, 300, 1500))
    spec = prepare(tmp_path, tmp_path / "out", min_reviews=5).spec
    train: dict[int, set[int]] = {}
    everything: dict[int, set[int]] = {}
    for split in spec.splits:
        for row in rows_of(spec, split):
            if row["label"]:
                known = {row["item_id"], *row["history_item_id"]}
                everything.setdefault(row["user_id"], set()).update(known)
                if split == "train":
                    train.setdefault(row["user_id"], set()).update(known)
    for split, seen in (("train", train), ("valid", everything), ("test", everything)):
        for row in rows_of(spec, split):
            assert row["label"] == (row["item_id"] in seen[row["user_id"]])


# --- the time-aware split --------------------------------------------------------------------------------------------


def test_a_split_by_time_knows_nothing_of_the_future(tmp_path: Path) -> None:
    early = [
        (user, item, START + 10 * place + number)
        for number, user in enumerate("abc")
        for place, item in enumerate(["pen", "cup", "hat"])
    ]
    late = [("a", "new", START + 1000), ("a", "cup", START + 1001), ("b", "hat", START + 1002)]
    write_reviews(tmp_path / "raw" / "reviews_T.json", [*early, *late])
    write_meta(tmp_path / "raw" / "meta_T.json", [{"asin": "new", "categories": [["Future"]]}])
    settings = {"min_reviews": 2, "split": "time", "valid_share": 0, "test_share": 0.25, "reject_seen": False}
    result = prepare(tmp_path / "raw", tmp_path / "out", **settings)
    spec = result.spec
    vocabularies = Encoders.load(spec.folder).vocabularies
    assert vocabularies["item_id"].values.to_pylist() == ["cup", "hat", "pen"]
    assert vocabularies["category"].values.to_pylist() == ["no_category"]
    assert result.summary["unknown_targets_dropped"] == 1
    rows = [row for row in raw_rows(spec, "test") if row["label"]]
    assert [(row["user_id"], row["item_id"], row["history_item_id"]) for row in rows] == [
        ("a", "cup", ["pen", "cup", "hat"]),  # the event of an unknown item is no event
        ("b", "hat", ["pen", "cup", "hat"]),
    ]


# --- files and releases ----------------------------------------------------------------------------------------------

FLAT = [
    {"category": ["Office", "Pens"], "tech1": "", "title": "Pen, it's", "brand": "Bic", "asin": "pen"},
    {"category": ["Home"], "asin": "cup"},
    {"category": [], "asin": "bag"},
    {"category": ["Wear", "Hats"], "asin": "hat"},
]
PRODUCTS = [
    {"title": "Pen, it's", "categories": ["Office", "Pens"], "store": "Bic", "parent_asin": "pen"},
    {"main_category": "Home", "title": "Cup", "categories": [], "parent_asin": "cup"},
    {"main_category": None, "categories": [], "parent_asin": "bag"},
    {"main_category": "Fashion", "categories": ["Wear", "Hats"], "parent_asin": "hat"},
]


@pytest.mark.parametrize(
    ("name", "release", "meta", "entries"),
    [
        ("reviews_Toys.json.gz", 2014, "meta_Toys.json.gz", META),
        ("reviews_Toys_5.json", 2014, "meta_Toys.json", META),
        ("Toys_5.json.gz", 2018, "meta_Toys.json.gz", FLAT),
        ("Toys.json", 2018, "meta_Toys.json", FLAT),
        ("Toys.jsonl.gz", 2023, "meta_Toys.jsonl.gz", PRODUCTS),
        ("Toys.csv.gz", 2023, "meta_Toys.jsonl", PRODUCTS),
    ],
)
def test_every_release_gives_the_same_rows(
    name: str, release: int, meta: str, entries: Sequence[Mapping[str, Any]], tmp_path: Path
) -> None:
    write_reviews(tmp_path / "raw" / name, REVIEWS[::-1], release)  # the order of the lines does not matter
    write_meta(tmp_path / "raw" / meta, entries, literals=release == 2014)
    (tmp_path / "raw" / "PROVENANCE.txt").write_text("where it is from")
    result = prepare(tmp_path / "raw", tmp_path / "out", **BY_HAND, brand=True)
    assert str(release) in str(result.summary["layout"])
    rows = raw_rows(result.spec, "test")
    assert rows[0]["history_item_id"] == ["cup", "bag", "pen", "cup"]
    assert rows[0]["history_category"] == ["Home", "no_category", "Pens", "Home"]
    assert rows[0]["history_brand"] == ["no_brand", "no_brand", "Bic", "no_brand"]
    assert rows[0]["history_gap"] == pytest.approx([math.log(1 + gap) for gap in (9, 7, 7, 4)])
    assert rows[0]["timestamp"] == START + 9 * DAY
    assert pq.read_table(tmp_path / "out" / "items.parquet")["title"].to_pylist()[-1] == "Pen, it's"


def test_a_file_of_reviews_may_be_named_itself(tmp_path: Path) -> None:
    by_hand(tmp_path)
    prepare(tmp_path / "raw" / "reviews_Toys.json.gz", tmp_path / "again", **BY_HAND)
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "out")


def test_without_metadata_every_item_has_no_category(tmp_path: Path) -> None:
    write_reviews(tmp_path / "raw" / "Toys_5.json", REVIEWS)
    result = prepare(tmp_path / "raw", tmp_path / "out", **BY_HAND)
    assert result.summary["metadata"] == "none: no meta_Toys.json.gz beside the reviews"
    assert result.summary["items_without_category"] == result.summary["items"] == 6
    assert {row["category"] for row in raw_rows(result.spec, "train")} == {"no_category"}


def test_one_of_several_categories_is_named(tmp_path: Path) -> None:
    for name in ("reviews_Books.json.gz", "Toys/reviews_Toys_and_Games_5.json", "meta_Books.json"):
        write_reviews(tmp_path / "raw" / name, REVIEWS)
    write_meta(tmp_path / "raw" / "meta_Books.json", META)
    with pytest.raises(DataError, match="holds the reviews of 'Books', 'Toys_and_Games'; name one of them, as --set"):
        prepare(tmp_path / "raw", tmp_path / "out", **BY_HAND)
    with pytest.raises(SettingsError, match=r"setting 'category': .*'Book' \(did you mean 'Books'\?\)"):
        prepare(tmp_path / "raw", tmp_path / "out", **BY_HAND, category="Book")
    assert prepare(tmp_path / "raw", tmp_path / "out", **BY_HAND, category="Books").summary["items_described"] == 5


def test_files_that_hold_no_reviews_are_no_category_and_each_is_told_what_it_lacks(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "prices.csv").write_text("shop,price\na,1\n")
    (raw / "users.csv").write_text("user_id,asin," + ",".join(f"c{n}" for n in range(9)) + "\n")
    (raw / "notes.json").write_text("hello\n")
    (raw / "empty.jsonl").write_text("")
    with pytest.raises(DataError) as caught:
        prepare(raw, tmp_path / "out", **BY_HAND)
    assert str(caught.value) == (
        f"{raw}: no file there holds reviews: 4 problems\n"
        "  - empty.jsonl: is empty; expected a review a line\n"
        "  - notes.json: line 1: is no JSON object: 'hello'; expected a review a line\n"
        "  - prices.csv: lacks 'reviewerID', 'asin', 'unixReviewTime' of the layout of 2014 and 2018; it has 'shop', "
        "'price'\n"
        "  - users.csv: lacks 'timestamp' of the layout of 2023, of their variants; it has 'user_id', 'asin', 'c0', "
        "'c1', 'c2', 'c3', 'c4', 'c5' and 3 more"
    )
    write_reviews(raw / "Toys.csv", REVIEWS)  # the only one that is what its name says
    assert prepare(raw, tmp_path / "out", **BY_HAND).summary["category"] == "Toys"
    with pytest.raises(SettingsError, match=r"unknown category 'Toy' \(did you mean 'Toys'\?\); known: 'Toys'$"):
        prepare(raw, tmp_path / "other", **BY_HAND, category="Toy")


def test_what_is_no_folder_of_reviews_is_told_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("nothing")
    with pytest.raises(DataError, match=r"holds no reviews; found 'a.txt'(?s:.*)2014: reviews_X\.json\.gz(?s:.*)2023:"):
        prepare(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match=r"a\.txt: is named like no file of reviews"):
        prepare(tmp_path / "a.txt", tmp_path / "out")
    with pytest.raises(DataError, match="no such file or folder"):
        prepare(tmp_path / "nowhere", tmp_path / "out")


def test_two_files_that_say_the_same_are_not_chosen_between(tmp_path: Path) -> None:
    for name in ("reviews_A.json", "reviews_A_5.json"):
        write_reviews(tmp_path / "two" / name, REVIEWS)
    with pytest.raises(DataError, match=r"several files of reviews of A: .*reviews_A\.json.*; name one"):
        prepare(tmp_path / "two", tmp_path / "out")
    for name in ("meta_A.json", "meta_A.jsonl"):
        write_meta(tmp_path / "two" / name, META)
    with pytest.raises(DataError, match="which say the same of the items; keep one"):
        prepare(tmp_path / "two" / "reviews_A.json", tmp_path / "out")


# --- what is wrong with files ----------------------------------------------------------------------------------------


def with_reviews(tmp_path: Path, content: str | bytes, name: str = "reviews_A.json") -> Path:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return tmp_path


GOOD = '{"reviewerID": "ann", "asin": "pen", "unixReviewTime": 1300000000}\n'


def test_malformed_reviews_are_named_by_line(tmp_path: Path) -> None:
    raw = with_reviews(
        tmp_path,
        GOOD + '\n{"reviewerID": "ann", "unixReviewTime": 1}\n{"reviewerID": "ann"\n'
        '{"reviewerID": "b", "asin": "c", "unixReviewTime": "noon"}\n',
    )
    with pytest.raises(DataError) as caught:
        prepare(raw, tmp_path / "out", min_reviews=1)
    assert "reviews_A.json: 3 problems" in str(caught.value)
    assert "line 3: 'asin' has no value; expected one in every row" in str(caught.value)
    assert "line 4: is no JSON object" in str(caught.value)
    assert "line 5: 'unixReviewTime' is 'noon'; expected a whole number" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; expected a review a line"),
        (b"{'reviewerID': 'a'}\n", r"line 1: is no JSON object: .*; expected a review a line"),
        (b"\n[1]\n", r"line 2: is no JSON object: '\[1\]'"),
        (b'{"user": 1, "item": 2}\n', "is no file of reviews; its first one holds 'user', 'item'(?s:.*)reviewerID"),
    ],
)
def test_files_that_are_no_reviews_are_said(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"reviews_A\.json: {said}"):
        prepare(with_reviews(tmp_path, content), tmp_path / "out")


@pytest.mark.parametrize("keep", [10, -30])
def test_packed_files_that_were_cut_short_are_said(keep: int, tmp_path: Path) -> None:
    lines = "".join(GOOD.replace("pen", f"pen{number * 7919 % 10007}") for number in range(3000))
    raw = with_reviews(tmp_path, gzip.compress(lines.encode())[:keep], "reviews_A.json.gz")
    with pytest.raises(DataError, match=r"reviews_A\.json\.gz: the compressed file was cut short; download it again"):
        prepare(raw, tmp_path / "out", min_reviews=1)
    good = write_reviews(tmp_path / "good" / "reviews_A.json", REVIEWS).parent
    (good / "meta_A.json.gz").write_bytes(gzip.compress(b"{'asin': 'pen'}\n" * 5000)[:-20])
    with pytest.raises(DataError, match=r"meta_A\.json\.gz: the compressed file was cut short"):
        prepare(good, tmp_path / "out", min_reviews=1)


def test_lines_about_items_that_are_no_literals_are_named_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    lines = [
        "{'asin': 'cup', 'title': 'a'}",
        f"{{'asin': 'pen', 'title': __import__('pathlib').Path({str(mark)!r}).touch()}}",
        "{'asin': 'hat', 'categories': [['a'",
        "['asin', 'pen']",
        "",
        "{'title': 'whose?'}",
        "{'asin': 'axe', 'title': " + "[" * 3000 + "]" * 3000 + "}",
        "{'asin': 'nobody', 'title': __import__('os')}",
    ]
    raw = write_reviews(tmp_path / "raw" / "reviews_A.json", REVIEWS).parent
    (raw / "meta_A.json").write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        prepare(raw, tmp_path / "out", min_reviews=1)
    told = [problem.split(":")[0] for problem in caught.value.problems]
    assert told == ["line 2", "line 3", "line 4", "line 6", "line 7"]
    assert "meta_A.json: 5 problems" in str(caught.value)
    assert "line 3: is neither a JSON object nor a Python literal of one: \"{'asin': 'hat'" in str(caught.value)
    assert "line 6: names no item; expected a key 'asin' or 'parent_asin'" in str(caught.value)
    assert not mark.exists()


def test_a_line_beyond_all_bounds_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "lines", partial(archives.lines, most=1000))
    raw = write_reviews(tmp_path / "raw" / "reviews_A.json", REVIEWS).parent
    (raw / "meta_A.json").write_text("{'asin': 'pen'}\n" + "{'asin': 'cup', 'title': '" + "x" * 2000 + "'}")
    with pytest.raises(DataError, match=r"meta_A\.json: line 2: is longer than"):
        prepare(raw, tmp_path / "out", min_reviews=1)


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("""{'asin': 'pen', 'title': "It's, 'related': {'also_bought': ['x']}"}""", "It's"),
        (r"{'asin': 'pen', 'title': 'caf\xe9 \' \" \/'}", "café ' \" \\/"),
        ("""{"asin": "pen", "title": "JSON \\u00e9"}""", "JSON é"),
        ("{'title': 'late', 'asin': 'pen', 'related': {'also_viewed': ['a', 'b'], 'buy_after_viewing': []}}", "late"),
    ],
)
def test_texts_in_literals_come_out_as_they_are(line: str, title: str, tmp_path: Path) -> None:
    """But for what looks like a list of related items, which is cut out before parsing."""
    (tmp_path / "meta_A.json").write_text(line, encoding="utf-8")
    found = reviews.describe(tmp_path / "meta_A.json", ["pen"], lambda *_: None)
    assert found.table["title"].to_pylist() == [title]


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "tfrecord", "history": None}, "format=tfrecord can't hold history=None"),
        ({"format": "tfrecord", "negative_history": False}, "format=tfrecord can't hold negative_history=False"),
        ({"format": "tfrecord", "categories": "path"}, "format=tfrecord can't hold categories=path"),
        ({"format": "tfrecord", "split": "time"}, "format=tfrecord can't hold split=time"),
        ({"format": "tfrecord", "split": "users"}, "format=tfrecord can't hold split=users"),
        ({"prebatch": 8}, "'prebatch' say how records are written; set format=tfrecord too"),
        ({"split": "time", "valid": False}, "with split=time set valid_share=0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Settings.model_validate(settings)


def test_without_histories_it_is_positives_and_series(toys: Path, tmp_path: Path) -> None:
    spec = prepare(toys, tmp_path / "out", min_reviews=5, history=None, train_negatives=0).spec
    assert spec.role("history") == ()
    assert {row["label"] for row in rows_of(spec, "train")} == {1}


@pytest.mark.parametrize(("given", "left"), [(None, None), ("2GB", "1300MB"), ("1GB", "800MB"), ("512MB", "512MB")])
def test_rows_in_flight_are_taken_off_the_engines_memory(given: str | None, left: str | None) -> None:
    assert amazon._limit_of_engine(given) == left


def test_blocks_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "USERS_PER_GROUP", 2)
    by_hand(tmp_path, name="whole", train_negatives=2)
    monkeypatch.setattr(histories, "VALUES", 300)
    of_part = interaction_rows.blocks_of_part
    monkeypatch.setattr(
        interaction_rows,
        "blocks_of_part",
        lambda part, rows: (pair for block in of_part(part, rows) for pair in _in_pairs(block)),
    )
    by_hand(tmp_path, name="parts", train_negatives=2)
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "parts")


def _in_pairs(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, 2):
        yield table.slice(start, 2)


# --- the published records -------------------------------------------------------------------------------------------


PUBLISHED_NAMES = {
    "label": "label",
    "user_feat_0": "user_id",
    "item_feat_0_trgt": "item_id",
    "item_feat_1_trgt": "category",
    "item_feat_0_pos": "history_item_id",
    "item_feat_1_pos": "history_category",
    "item_feat_0_neg": "negative_history_item_id",
    "item_feat_1_neg": "negative_history_category",
}


def test_records_hold_the_rows_left_padded_under_the_published_names(hand: FeatureSpec, tmp_path: Path) -> None:
    spec = by_hand(tmp_path, name="records", format="tfrecord", train_files=3, test_files=1).spec
    check(spec)
    files = [path.name for path in sorted((tmp_path / "records" / "train").iterdir())]
    assert files == [f"part_{number}.tfrecord" for number in range(3)]
    index = tfrecord.Index.of(tmp_path / "records" / "test" / "part_0.tfrecord")
    held = index.read(0, len(index), list(PUBLISHED_NAMES))
    assert len(index) == 4
    first = rows_of(hand, "test")[0]
    for name, source in PUBLISHED_NAMES.items():
        value = first[source]
        expected = [0] * (100 - len(value)) + value if isinstance(value, list) else [int(value)]
        assert held[name].values[held[name].offsets[0] : held[name].offsets[1]].tolist() == expected, name
    for split in ("train", "test"):
        for record, row in zip(rows_of(spec, split), rows_of(hand, split), strict=True):
            assert record == {name: row[source] for name, source in PUBLISHED_NAMES.items()}


def test_the_published_specification_says_it_in_its_own_words(tmp_path: Path) -> None:
    by_hand(tmp_path, format="tfrecord", history=7)
    told = yaml.safe_load((tmp_path / "out" / "published_feature_spec.yaml").read_text())
    assert told["feature_spec"]["item_feat_0_trgt"] == {"dtype": "int64", "cardinality": 6}
    assert told["feature_spec"]["item_feat_1_neg"] == {"dtype": "int64", "cardinality": 4, "dimensions": [7]}
    assert told["feature_spec"]["user_feat_0"] == {"dtype": "int64", "cardinality": 3}
    assert told["feature_spec"]["label"] == {"dtype": "bool"}
    assert told["channel_spec"] == {
        "user_features": ["user_feat_0"],
        "target_item_features": ["item_feat_0_trgt", "item_feat_1_trgt"],
        "positive_history": ["item_feat_0_pos", "item_feat_1_pos"],
        "negative_history": ["item_feat_0_neg", "item_feat_1_neg"],
        "label": ["label"],
    }
    assert set(told["source_spec"]) == {"train", "test"}


def published(folder: Path, **settings: object) -> Path:
    """A folder as the reference leaves one: its records and its own specification, nothing else."""
    by_hand(folder, name="records", format="tfrecord", **settings)
    for split in ("train", "test"):
        shutil.copytree(folder / "records" / split, folder / "published" / split)
    shutil.copy(folder / "records" / "published_feature_spec.yaml", folder / "published" / "feature_spec.yaml")
    return folder / "published"


@pytest.mark.parametrize("prebatch", [0, 3, 100])
def test_records_of_the_reference_are_read_as_they_were_meant(prebatch: int, hand: FeatureSpec, tmp_path: Path) -> None:
    raw = published(tmp_path, prebatch=prebatch, train_files=2)
    train = {path.name for path in (raw / "train").iterdir()}
    assert (
        train
        == {
            0: {"part_0.tfrecord", "part_1.tfrecord"},
            100: {"remainder.tfrecord"},
            3: {"part_0.tfrecord", "part_1.tfrecord", "remainder.tfrecord"},
        }[prebatch]
    )
    result = prepare(raw, tmp_path / "read")
    spec = result.spec
    check(spec)
    assert result.summary["rows"] == {"train": 8, "test": 4}
    assert spec.vocabulary("item_feat_1_neg") == "item_feat_1_trgt"
    assert spec.num_ids("item_feat_0_trgt") == spec.num_ids("item_feat_0_pos") == 7
    for split in ("train", "test"):
        read, expected = rows_of(spec, split), rows_of(hand, split)
        assert [row["item_feat_0_pos"] for row in read] == [row["history_item_id"] for row in expected]
        assert [row["item_feat_1_trgt"] for row in read] == [row["category"] for row in expected]
        assert [row["label"] for row in read] == [bool(row["label"]) for row in expected]


def test_records_become_other_chunks_and_back(tmp_path: Path) -> None:
    spec = by_hand(tmp_path, format="tfrecord").spec
    there = transcode(spec, tmp_path / "parquet")
    back = transcode(there, tmp_path / "back", "tfrecord")
    assert rows_of(spec, "train") == rows_of(there, "train") == rows_of(back, "train")
    prepared = by_hand(tmp_path, name="plain", gaps=False).spec
    records = transcode(prepared, tmp_path / "unpadded", "tfrecord")
    assert rows_of(records, "test") == rows_of(prepared, "test")


def test_records_whose_channels_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    raw = published(tmp_path)
    path = raw / "feature_spec.yaml"
    good = yaml.safe_load(path.read_text())

    def problem(**channels: list[str]) -> str:
        path.write_text(yaml.safe_dump({**good, "channel_spec": {**good["channel_spec"], **channels}}))
        with pytest.raises(SpecError) as caught:
            prepare(raw, tmp_path / "read")
        return str(caught.value)

    assert "'negative_history' holds 'item_feat_0_neg', but 'target_item_features' 'item_feat_0_trgt'" in problem(
        negative_history=["item_feat_0_neg"]
    )
    assert "'item_feat_1_pos' has cardinality 4, but 'item_feat_0_trgt', whose ids it shares by its place" in problem(
        positive_history=["item_feat_1_pos", "item_feat_0_pos"]
    )
    assert "channel 'user_features' is missing or empty" in problem(user_features=[])
    with pytest.raises(SpecError, match="recspec wrote it; use `recspec transcode`"):
        prepare(tmp_path / "records", tmp_path / "read")


def test_records_read_as_they_stand_say_what_to_do(tmp_path: Path) -> None:
    spec = FeatureSpec.load(published(tmp_path))
    told = (
        r"'item_feat_0_pos', 'item_feat_1_pos', 'item_feat_0_neg', 'item_feat_1_neg' are histories without `padding`, "
        r"and ids are too large; if these are SIM's published records, .* `recspec prepare amazon FOLDER OUT` reads "
        r"them; else give the largest id plus one as cardinality\n.*6 is too large for an id: the cardinality is 6"
    )
    for reading in (lambda: check(spec), lambda: transcode(spec, tmp_path / "other"), lambda: rows_of(spec, "train")):
        with pytest.raises(DataError, match=f"(?s){told}"):
            reading()
    prepared = prepare(tmp_path / "published", tmp_path / "read").spec
    assert (spec.leaves_padding_unsaid, prepared.leaves_padding_unsaid) == (spec.columns("train")[4:], ())


def test_records_are_taken_as_they_are(tmp_path: Path) -> None:
    raw = published(tmp_path)
    with pytest.raises(SettingsError, match="records are taken as they are; 'min_reviews', 'seed' can't be set"):
        prepare(raw, tmp_path / "read", min_reviews=5, seed=3)
    assert prepare(raw, tmp_path / "read").message.startswith("prepared")
    assert prepare(raw, tmp_path / "read").message.startswith("already prepared")


# --- real data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reviews", "users", "items"),
    [
        ("amazon-musical-instruments", 10_261, 1_429, 900),
        pytest.param("amazon-beauty", 198_502, 22_363, 12_101, marks=pytest.mark.slow),
    ],
)
def test_real_categories_have_the_published_sizes(
    name: str, reviews: int, users: int, items: int, tmp_path: Path, real_data: Callable[[str], Path]
) -> None:
    result = prepare(real_data(name), tmp_path / "out", min_reviews=5, **PUBLISHED)
    assert (result.summary["interactions"], result.summary["users"], result.summary["items"]) == (reviews, users, items)
    assert result.summary["rows"] == {"train": 2 * (reviews - 2 * users), "valid": 0, "test": 2 * users}


# --- Spark -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_spark_names_what_is_wrong_too(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs a command `java`")
    raw = with_reviews(tmp_path, GOOD + '{"reviewerID": "ann", "unixReviewTime": 1}\n')
    with pytest.raises(RecspecError, match="line 2: 'asin' has no value"):
        prepare(raw, tmp_path / "out", "spark", min_reviews=1)
