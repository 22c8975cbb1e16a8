"""Outbrain: every feature against rows worked by hand, and what the statistics of a row may not know."""

from __future__ import annotations

import csv
import hashlib
import math
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.hashing import fingerprint64
from recspec.data.prepare import PrepareContext
from recspec.data.prepare.prepared import Prepared
from recspec.data.storage import open_split
from recspec.data.storage.check import check
from recspec.datasets import outbrain
from recspec.datasets.outbrain import CARDINALITIES, Settings
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from tests import made_up_outbrain
from tests.made_up_outbrain import DAY

Columns = Mapping[str, NDArray[np.generic]]


def prepare(raw: Path, out: Path, engine: str = "duckdb", **settings: object) -> Prepared:
    return outbrain.prepare(PrepareContext(raw, out, threads=1, engine=engine), Settings.model_validate(settings))


def columns_of(spec: FeatureSpec, split: str) -> Columns:
    """Every column of a split, lists as rows padded with 0."""
    read = open_split(spec, split).read(0, 10**9)
    padded = {}
    for name, column in read.items():
        rows = column.tolist()
        padded[name] = np.array([(row + [0] * 3)[:3] for row in rows]) if isinstance(rows[0], list) else np.array(rows)
    return padded


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file but those that name the raw files or the settings."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "prepare.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# --- a few raw rows --------------------------------------------------------------------------------------------------


def fold_of(display: int) -> int:
    """Of two folds with seed 0: whether the digest lies in the upper half."""
    return int(hashlib.md5(f"fold:0:{display}".encode()).hexdigest()[0], 16) // 8


FOLDS = {fold: [display for display in range(1, 100) if fold_of(display) == fold][:12] for fold in (0, 1)}
"""Twelve displays in each fold: those of fold 0 show ads 1 and 2, those of fold 1 ads 1, 2 and 3."""
CLICKED = {**dict.fromkeys(FOLDS[0], 1), **dict.fromkeys(FOLDS[1][:9], 2), **dict.fromkeys(FOLDS[1][9:], 3)}
TEST = 901
"""A display of day 11, which is for test; it shows all three ads."""
HOUR = DAY // 24

TRAIN_EVENTS = [f"{display},u{display},100,{DAY + HOUR},1,GB" for display in sorted(CLICKED)]
CLICKS = [
    f"{display},{ad},{int(ad == clicked)}"
    for display, clicked in sorted({**CLICKED, TEST: 2}.items())
    for ad in ((1, 2) if display in FOLDS[0] else (1, 2, 3))
]
TABLES: Mapping[str, list[str]] = {
    "clicks_train": ["display_id,ad_id,clicked", *CLICKS],
    "events": [
        "display_id,uuid,document_id,timestamp,platform,geo_location",
        *TRAIN_EVENTS,
        f"{TEST},reader,100,{11 * DAY + HOUR},2,US>CA>807",
    ],
    "promoted_content": ["ad_id,document_id,campaign_id,advertiser_id", "1,200,11,21", "2,300,12,21", "3,400,11,22"],
    "documents_meta": [
        "document_id,source_id,publisher_id,publish_time",
        "100,7,70,2016-06-01 00:00:00",
        "200,8,,2016-06-10 00:00:00",
        "300,\\N,60,\\N",
        "500,9,\\N,2016-06-10 00:00:00",
    ],
    "documents_categories": [
        "document_id,category_id,confidence_level",
        "100,1611,0.9",
        "100,1403,0.1",
        "200,1611,0.5",
        "300,1403,0.8",
    ],
    "documents_topics": [
        "document_id,topic_id,confidence_level",
        "100,9,0.3",
        "100,5,0.3",
        "100,2,0.1",
        "100,7,0.6",
        "200,7,1.0",
        "999,1,0.5",
    ],
    "documents_entities": ["document_id,entity_id,confidence_level", "100,f9eec25663db4cd8,0.5", "200,0033,0.5"],
}

BY_HAND = {"test": 0, "valid": 0, "folds": 2}
"""Settings under which all of the first eleven days are for train."""


def write(folder: Path, tables: Mapping[str, list[str]] = TABLES, **changed: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name, lines in {**tables, **changed}.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def hashed(text: str, name: str) -> int:
    return 1 + int(fingerprint64(pa.array([text]))[0] % np.uint64(CARDINALITIES[name] - 1))


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    folder = tmp_path_factory.mktemp("by hand")
    return prepare(write(folder / "raw"), folder / "out", **BY_HAND).spec


LN = math.log
COUNT_LOGS = np.repeat([LN(24), LN(24), LN(12)], [24, 24, 12])
"""ln(1 + count) of the 60 train rows, each count without the row: ads 1 and 2 have 24 rows, ad 3 has 12."""


def scaled(count: int) -> float:
    return float((LN(1 + count) - COUNT_LOGS.mean()) / COUNT_LOGS.std())


# documents 100 and 200 share topic 7 (two of three documents have it); 100 has 2, 5 and 9 for itself
OF_TOPICS = {7: 0.6 * LN(3 / 2), 9: 0.3 * LN(3), 5: 0.3 * LN(3), 2: 0.1 * LN(3)}
TOPIC_COSINE = OF_TOPICS[7] / math.sqrt(sum(weight**2 for weight in OF_TOPICS.values()))
SIMILARITY = "document_id_document_id_promo_sim"

EXPECTED_OF_AD = {
    "ad_id": [hashed("1", "ad_id"), hashed("2", "ad_id"), hashed("3", "ad_id")],
    "document_id_promo": [hashed(text, "document_id_promo") for text in ("200", "300", "400")],
    "campaign_id": [hashed(text, "campaign_id") for text in ("11", "12", "11")],
    "advertiser_id": [hashed(text, "advertiser_id") for text in ("21", "21", "22")],
    "source_id_promo": [hashed("8", "source_id_promo"), 0, 0],
    "publisher_id_promo": [hashed("72", "publisher_id_promo"), hashed("60", "publisher_id_promo"), 0],
    f"{SIMILARITY}_categories": [0.9 / math.sqrt(0.82), 0.1 / math.sqrt(0.82), 0],
    f"{SIMILARITY}_topics": [TOPIC_COSINE, 0, 0],
    f"{SIMILARITY}_entities": [0, 0, 0],
    "ad_id_ctr": [12 / 24, 9 / 24, 3 / 12],
    "document_id_promo_ctr": [12 / 24, 9 / 24, 3 / 12],
    "publisher_id_promo_ctr": [12 / 24, 9 / 24, 0],
    "source_id_promo_ctr": [12 / 24, 0, 0],
    "advertiser_id_ctr": [21 / 48, 21 / 48, 3 / 12],
    "campaign_id_ctr": [15 / 36, 9 / 24, 15 / 36],
    "ad_id_count": [scaled(24), scaled(24), scaled(12)],
    "document_id_promo_count": [scaled(24), scaled(24), scaled(12)],
    # 2016-06-25 04:59:59.998 is 15 days after; where no time is known, train's median of 5 days counts
    "publish_time_promo_days_since_published": [LN(1 + 15), LN(1 + 5), LN(1 + 5)],
}
EXPECTED_OF_DISPLAY = {
    "document_id": hashed("100", "document_id"),
    "platform": 2,
    "geo_location": hashed("US>CA>807", "geo_location"),
    "geo_location_state": hashed("US>CA", "geo_location_state"),
    "geo_location_country": hashed("US", "geo_location_country"),
    "source_id": hashed("7", "source_id"),
    "publisher_id": hashed("70", "publisher_id"),
    "category_id_list": [hashed("1611", "category_id_list"), hashed("1403", "category_id_list"), 0],
    "topic_id_list": [hashed(text, "topic_id_list") for text in ("7", "5", "9")],
    "entity_id_list": [hashed("f9eec25663db4cd8", "entity_id_list"), 0, 0],
    "publish_time_days_since_published": LN(1 + 24),
}


@pytest.mark.parametrize("name", EXPECTED_OF_AD)
def test_each_feature_of_an_ad_is_as_worked_out_by_hand(name: str, by_hand: FeatureSpec) -> None:
    assert columns_of(by_hand, "test")[name].tolist() == pytest.approx(EXPECTED_OF_AD[name], abs=1e-6)


@pytest.mark.parametrize("name", EXPECTED_OF_DISPLAY)
def test_each_feature_of_a_display_is_as_worked_out_by_hand(name: str, by_hand: FeatureSpec) -> None:
    values = columns_of(by_hand, "test")[name]
    assert values.tolist() == [pytest.approx(EXPECTED_OF_DISPLAY[name], abs=1e-6)] * 3


def test_these_are_the_published_29_features_and_the_label_and_group_are_the_displays(by_hand: FeatureSpec) -> None:
    assert set(by_hand.inputs()) == {*EXPECTED_OF_AD, *EXPECTED_OF_DISPLAY}
    assert len(by_hand.inputs(categorical=True, is_list=False)) == 13
    assert len(by_hand.inputs(is_list=True)) == 3
    assert len(by_hand.inputs(categorical=False)) == 13
    for name, cardinality in {**CARDINALITIES, "platform": 4}.items():
        assert by_hand.features[name].cardinality == cardinality, name
    assert by_hand.role("item") == tuple(EXPECTED_OF_AD)
    assert by_hand.item_id == "ad_id"
    assert by_hand.metadata["cut_offs"] == [12]
    test = columns_of(by_hand, "test")
    assert test[by_hand.label].tolist() == [0, 1, 0]
    assert test["group"].tolist() == [TEST] * 3
    check(by_hand)


def test_click_rates_of_train_rows_come_from_the_other_fold(by_hand: FeatureSpec) -> None:
    train = columns_of(by_hand, "train")
    lower = np.isin(train["group"], FOLDS[0])
    ads = {ad: train["ad_id"] == hashed(str(ad), "ad_id") for ad in (1, 2, 3)}
    rates = {
        "ad_id_ctr": {(0, 1): 0, (0, 2): 9 / 12, (1, 1): 1, (1, 2): 0, (1, 3): 0},
        "advertiser_id_ctr": {(0, 1): 9 / 24, (1, 2): 12 / 24, (1, 3): 0},
        "campaign_id_ctr": {(0, 1): 3 / 24, (0, 2): 9 / 12, (1, 1): 1, (1, 3): 1},
    }
    for name, found in rates.items():
        for (fold, ad), rate in found.items():
            chosen = train[name][ads[ad] & (lower == (fold == 0))]
            assert chosen.tolist() == pytest.approx([rate] * len(chosen)), (name, fold, ad)
    assert train["ad_id_count"][ads[1]].tolist() == pytest.approx([scaled(23)] * 24, abs=1e-6)


def test_folds_zero_is_the_published_leak(tmp_path: Path) -> None:
    spec = prepare(write(tmp_path / "raw"), tmp_path / "out", **{**BY_HAND, "folds": 0}).spec
    train = columns_of(spec, "train")
    first = train["ad_id"] == hashed("1", "ad_id")
    assert set(train["ad_id_ctr"][first].tolist()) == {0.5}
    logs = np.log(np.repeat([25, 25, 13], [24, 24, 12]))
    assert train["ad_id_count"][first][0] == pytest.approx((LN(25) - logs.mean()) / logs.std(), abs=1e-6)


@pytest.mark.slow
def test_a_rate_of_too_few_rows_is_zero(tmp_path: Path) -> None:
    """Of 5 displays an ad's rate counts, an advertiser's takes 10; of 4 neither does."""
    settings = {**BY_HAND, "folds": 0, "cardinalities": {"ad_id": 50, "topic_id_list": 7}}
    for count, expected in ((4, 0.0), (5, 1.0)):
        clicks = ["display_id,ad_id,clicked", *(f"{display},1,1" for display in sorted(CLICKED)[:count])]
        raw = write(tmp_path / f"raw {count}", clicks_train=[*clicks, f"{TEST},1,0"])
        spec = prepare(raw, tmp_path / str(count), **settings).spec
        assert (spec.features["ad_id"].cardinality, spec.features["topic_id_list"].cardinality) == (50, 7)
        test = columns_of(spec, "test")
        assert test["ad_id_ctr"].tolist() == [expected]
        assert test["advertiser_id_ctr"].tolist() == [0.0]


def test_days_outside_ten_years_count_as_none_and_unreadable_times_as_missing(tmp_path: Path) -> None:
    times = ["2016-07-01 00:00:00", "1999-01-01 00:00:00", "2016-06-15 04:59:59", "soon"]
    documents = [f"{document},1,1,{time}" for document, time in zip((100, 200, 300, 400), times, strict=True)]
    raw = write(tmp_path / "raw", documents_meta=[TABLES["documents_meta"][0], *documents])
    spec = prepare(raw, tmp_path / "out", **BY_HAND).spec
    test = columns_of(spec, "test")
    assert test["publish_time_days_since_published"].tolist() == [0.0] * 3
    # ad 2: 10 days and a second; ad 3: the median of train, where ad 1 counts 0 days and ad 2, a second before, 0 too
    assert test["publish_time_promo_days_since_published"].tolist() == pytest.approx([0, LN(11), 0], abs=1e-6)


def test_what_is_missing_has_id_zero(tmp_path: Path) -> None:
    events = [*TABLES["events"][:-1], f"{TEST},reader,777,{11 * DAY},\\N,"]
    raw = write(tmp_path / "raw", events=events, promoted_content=TABLES["promoted_content"][:2])
    test = columns_of(prepare(raw, tmp_path / "out", **BY_HAND).spec, "test")
    for name in ("platform", "geo_location", "geo_location_state", "geo_location_country", "source_id", "publisher_id"):
        assert test[name].tolist() == [0] * 3, name
    assert test["topic_id_list"].tolist() == [[0] * 3] * 3
    assert test["campaign_id"].tolist() == [hashed("11", "campaign_id"), 0, 0]
    assert test["document_id"].tolist() == [hashed("777", "document_id")] * 3
    assert test["campaign_id_ctr"].tolist() == [0.5, 0, 0]  # without its ad's line, ad 3 adds nothing to campaign 11


# --- splits and statistics, on many made-up rows ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_outbrain.write(tmp_path_factory.mktemp("made up") / "raw", num_rows=4000, seed=2)


@pytest.fixture(scope="module")
def made(raw: Path) -> FeatureSpec:
    return prepare(raw, raw.parent / "out").spec


def days_of(raw: Path) -> dict[int, int]:
    with (raw / "events.csv").open() as file:
        return {int(row["display_id"]): int(row["timestamp"]) // DAY for row in csv.DictReader(file)}


def test_no_display_is_in_two_splits_and_the_shares_are_as_asked(raw: Path, made: FeatureSpec) -> None:
    days = days_of(raw)
    displays = {split: set(columns_of(made, split)["group"].tolist()) for split in made.splits}
    assert sum(map(len, displays.values())) == len(set.union(*displays.values()))
    early = {split: [display for display in found if days[display] < 11] for split, found in displays.items()}
    assert len(early["train"]) == len(displays["train"])
    assert len(early["valid"]) == len(displays["valid"])
    assert {days[display] for display in displays["test"]} == set(range(13))
    total = sum(map(len, early.values()))
    assert len(early["test"]) / total == pytest.approx(0.2, abs=0.05)
    assert len(early["valid"]) / total == pytest.approx(0.8 * 0.05, abs=0.025)
    assert sum(1 for day in days.values() if day >= 11) > len(displays["test"]) - len(early["test"]) > 0


def test_without_valid_and_test_shares_the_days_alone_split(raw: Path, tmp_path: Path) -> None:
    spec = prepare(raw, tmp_path / "out", valid=0, test=0, train_days=12).spec
    assert spec.splits == ("train", "test")
    days = days_of(raw)
    assert {days[display] for display in columns_of(spec, "test")["group"].tolist()} == {12}


def flipped(raw: Path, target: Path, *displays: int) -> Path:
    """A copy of the raw files in which another ad of some displays was clicked."""
    shutil.copytree(raw, target)
    lines = (raw / "clicks_train.csv").read_text().splitlines()
    for display in displays:
        places = [place for place, line in enumerate(lines) if line.startswith(f"{display},")]
        labels = [lines[place][-1] for place in places]
        for place, label in zip(places, labels[1:] + labels[:1], strict=True):
            lines[place] = lines[place][:-1] + label
    (target / "clicks_train.csv").write_text("\n".join(lines) + "\n")
    return target


def changed_features(one: Columns, two: Columns, rows: NDArray[np.bool_] | slice = slice(None)) -> set[str]:
    return {name for name in one if name != "label" and (one[name][rows] != two[name][rows]).any()}


def a_display(spec: FeatureSpec, split: str) -> int:
    """One with several ads, the first to come."""
    displays, counts = np.unique(columns_of(spec, split)["group"], return_counts=True)
    return int(displays[counts > 3][0])


def test_labels_of_valid_and_test_change_no_feature_of_any_row(raw: Path, made: FeatureSpec, tmp_path: Path) -> None:
    displays = [a_display(made, split) for split in ("valid", "test")]
    other = prepare(flipped(raw, tmp_path / "raw", *displays), tmp_path / "out").spec
    for name in made.splits:
        one, two = columns_of(made, name), columns_of(other, name)
        assert not changed_features(one, two)
        assert (one["label"] != two["label"]).any() == (name != "train")
    assert bytes_of(other.folder)["encoders.json"] == bytes_of(made.folder)["encoders.json"]


def test_a_train_rows_label_changes_no_feature_of_its_own_display(raw: Path, made: FeatureSpec, tmp_path: Path) -> None:
    display = a_display(made, "train")
    copy = flipped(raw, tmp_path / "raw", display)
    one, two = columns_of(made, "train"), columns_of(prepare(copy, tmp_path / "out").spec, "train")
    own = one["group"] == display
    assert (one["label"][own] != two["label"][own]).any()
    assert not changed_features(one, two, own)
    assert "ad_id_ctr" in changed_features(one, two)  # of rows in other folds
    leaky = [prepare(files, tmp_path / f"leaky {files.parent.name}", folds=0).spec for files in (raw, copy)]
    assert "ad_id_ctr" in changed_features(*(columns_of(spec, "train") for spec in leaky), own)


@pytest.mark.slow
def test_the_planted_signal_shows_in_the_click_rates_and_the_published_leak_flatters_them(tmp_path: Path) -> None:
    raw = made_up_outbrain.write(tmp_path / "raw", num_rows=6000, seed=3, page_views=False, clicks_test=False)
    spec = prepare(raw, tmp_path / "out").spec
    test = columns_of(spec, "test")
    by_rate = metrics.rank_groups(test["ad_id_ctr"], test["label"], test["group"])
    by_chance = metrics.rank_groups(np.random.default_rng(0).random(len(test["label"])), test["label"], test["group"])
    assert metrics.mean_average_precision(by_rate, 12) > metrics.mean_average_precision(by_chance, 12) + 0.1
    clicked = test["label"] == 1
    alike = test[f"{SIMILARITY}_categories"]
    assert alike[clicked].mean() > alike[~clicked].mean() * 1.3
    leaky = prepare(raw, tmp_path / "leaky", folds=0).spec
    for split, flattered in (("train", True), ("test", False)):
        labels = columns_of(spec, split)["label"]
        honest, told = (metrics.auc(columns_of(found, split)["campaign_id_ctr"], labels) for found in (spec, leaky))
        assert (told > honest) == flattered, split


def test_rows_keep_the_order_of_the_raw_file(raw: Path, made: FeatureSpec) -> None:
    lines = [line.split(",") for line in (raw / "clicks_train.csv").read_text().splitlines()[1:]]
    test = columns_of(made, "test")
    held = set(test["group"].tolist())
    expected = [(int(display), int(label)) for display, _, label in lines if int(display) in held]
    assert list(zip(test["group"].tolist(), test["label"].astype(int).tolist(), strict=True)) == expected


# --- what readers saw ------------------------------------------------------------------------------------------------

NOW = 11 * DAY + HOUR
VIEWS = [
    "uuid,document_id,timestamp,platform,geo_location,traffic_source",
    f"reader,100,{NOW},2,US>CA>807,3",
    f"reader,100,{NOW - 9},2,US>CA>807,2",
    f"reader,200,{NOW - DAY},2,US,1",  # promoted to the reader in test: in no profile, yet seen before
    f"reader,998,{NOW - 5},2,US,1",
    f"reader,998,{NOW - 4},2,US,1",
    f"reader,400,{NOW + 1},2,US,1",  # the leak
    f"reader,300,{NOW},2,US,1",  # at the very time: the leak too
    "nobody,200,5,1,GB,1",
    f"u{FOLDS[0][0]},200,{DAY + HOUR + 7},1,GB,1",
]
OF_998 = ["998,7,0.5", "998,1,0.5"]
"""Topics of a page that the reader saw; topics 7 and 1 are then in 3 and 2 of 4 documents."""


@pytest.fixture(scope="module")
def with_views(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    folder = tmp_path_factory.mktemp("views")
    raw = write(folder / "raw", page_views=VIEWS, documents_topics=[*TABLES["documents_topics"], *OF_998])
    return prepare(raw, folder / "out", page_views=True, **BY_HAND).spec


@pytest.mark.slow
def test_features_of_readers_are_as_worked_out_by_hand(with_views: FeatureSpec) -> None:
    test = columns_of(with_views, "test")
    views = np.array([0.0] * 60)  # no train reader saw anything before
    assert test["user_views"].tolist() == pytest.approx([LN(1 + 4) - views.mean()] * 3)
    assert test["traffic_source"].tolist() == [3] * 3  # the latest view up to the display
    assert test["user_has_already_viewed_doc"].tolist() == [2, 1, 1]  # ids of 1 and 0
    # pages 100 and 998, of which 100 has 9, 5 and 2 for itself
    profile = {7: (0.6 + 0.5) * LN(4 / 3), 1: 0.5 * LN(4 / 2), 9: 0.3 * LN(4), 5: 0.3 * LN(4), 2: 0.1 * LN(4)}
    cosine = profile[7] / math.hypot(*profile.values())
    assert test["user_doc_ad_sim_topics"].tolist() == pytest.approx([cosine, 0, 0], abs=1e-6)
    categories = EXPECTED_OF_AD[f"{SIMILARITY}_categories"]  # page 998 has none, so the profile is page 100
    assert test["user_doc_ad_sim_categories"].tolist() == pytest.approx(categories, abs=1e-6)
    assert columns_of(with_views, "train")["traffic_source"].tolist() == [0] * 60
    assert with_views.features["traffic_source"].cardinality == 4
    assert with_views.role("user") == ()
    check(with_views)


def test_the_leak_is_kept_for_evaluation_and_read_by_no_model(with_views: FeatureSpec) -> None:
    assert with_views.metadata["leak"] == "is_leak"
    assert columns_of(with_views, "test")["is_leak"].tolist() == [0, 1, 1]
    assert not columns_of(with_views, "train")["is_leak"].any()
    assert "is_leak" not in with_views.inputs()
    assert with_views.roles_of("is_leak") == ()


@pytest.mark.slow
def test_views_at_and_after_the_display_change_nothing_but_the_leak_and_the_source(
    raw: Path, made: FeatureSpec, tmp_path: Path
) -> None:
    """Each reader's views after its last display are cut off."""
    last: dict[str, int] = {}
    for row in csv.DictReader((raw / "events.csv").read_text().splitlines()):
        last[row["uuid"]] = max(last.get(row["uuid"], 0), int(row["timestamp"]))
    shutil.copytree(raw, tmp_path / "raw")
    lines = (raw / "page_views.csv").read_text().splitlines()
    kept = [line for line in lines[1:] if int(line.split(",")[2]) < last.get(line.split(",")[0], 0)]
    assert len(kept) < len(lines) - 1
    (tmp_path / "raw" / "page_views.csv").write_text("\n".join([lines[0], *kept]) + "\n")
    one, two = (
        prepare(files, tmp_path / name, page_views=True).spec for files, name in ((raw, "a"), (tmp_path / "raw", "b"))
    )
    for split in one.splits:
        changed = changed_features(columns_of(one, split), columns_of(two, split))
        assert changed <= {"is_leak", "traffic_source"}
    assert columns_of(one, "test")["is_leak"].sum() > columns_of(two, "test")["is_leak"].sum()
    without = columns_of(made, "test")
    assert not changed_features(without, columns_of(one, "test"))  # the 29 features are the same with and without


# --- rows to predict -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_submission_holds_the_raw_rows_of_clicks_test_as_the_encoders_take_them(
    by_hand: FeatureSpec, tmp_path: Path
) -> None:
    """The same three ads in another display of the same moment: what is prepared is what a test row holds."""
    events = [*TABLES["events"], f"902,other,100,{NOW},2,US>CA>807"]
    raw = write(tmp_path / "raw", events=events, clicks_test=["display_id,ad_id", "902,3", "902,1", "902,2"])
    spec = prepare(raw, tmp_path / "out", submission=True, **BY_HAND).spec
    rows = pq.read_table(tmp_path / "out" / "clicks_test.parquet")
    assert rows.column("display_id").to_pylist() == [902] * 3
    assert rows.column("ad_id").to_pylist() == [3, 1, 2]
    encoded = Encoders.load(tmp_path / "out").encode(rows, spec.inputs())
    for name, expected in EXPECTED_OF_AD.items():
        assert np.asarray(encoded[name]).tolist() == pytest.approx([expected[place] for place in (2, 0, 1)], abs=1e-6)
    topics, offsets = encoded["topic_id_list"]
    assert topics.tolist() == EXPECTED_OF_DISPLAY["topic_id_list"] * 3  # type: ignore[operator]
    assert offsets.tolist() == [0, 3, 6, 9]
    for split in ("train", "test"):
        assert not changed_features(columns_of(by_hand, split), columns_of(spec, split))


def test_rows_to_predict_are_of_displays_without_labels_that_have_events(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", clicks_test=["display_id,ad_id", f"{TEST},1", "902,3"])
    with pytest.raises(DataError, match=r"clicks_test\.csv: displays \[901\] stand in clicks_train\.csv too"):
        prepare(raw, tmp_path / "out", submission=True, **BY_HAND)
    raw = write(tmp_path / "other", clicks_test=["display_id,ad_id", "902,3"])
    with pytest.raises(DataError, match=r"1 row of clicks, of displays that events\.csv doesn't name.*\[902\]"):
        prepare(raw, tmp_path / "out", submission=True, **BY_HAND)


# --- files -----------------------------------------------------------------------------------------------------------


def zip_of(raw: Path, target: Path, folder: str, *, nested: bool) -> Path:
    """All tables in one zip, as they are or each in a zip of its own, as Kaggle's download is."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(raw.glob("*.csv")):
            if nested:
                inner = target.with_name(f"{path.name}.zip")
                with zipfile.ZipFile(inner, "w") as one:
                    one.write(path, path.name)
                archive.write(inner, f"{folder}{inner.name}")
                inner.unlink()
            else:
                archive.write(path, f"{folder}{path.name}")
    return target


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["zip of zips", "zip of tables", "zip that would lead out", "folder of zips", "deep"])
def test_zips_are_read_as_their_folder(shape: str, by_hand: FeatureSpec, tmp_path: Path) -> None:
    raw = write(tmp_path / "raw")
    if shape.startswith("zip"):
        folder = "../../" if "out" in shape else ""
        source = zip_of(raw, tmp_path / "outbrain.zip", folder, nested=shape == "zip of zips")
    elif shape == "folder of zips":
        source = tmp_path / "zips"
        source.mkdir()
        for path in raw.glob("*.csv"):
            with zipfile.ZipFile(source / f"{path.name}.zip", "w") as one:
                one.write(path, path.name)
    else:
        source = raw.parent
    prepare(source, tmp_path / "deep" / "out", **BY_HAND)
    assert bytes_of(tmp_path / "deep" / "out") == bytes_of(by_hand.folder)
    assert not list(tmp_path.parent.glob("*.csv"))


def test_missing_tables_are_all_named_and_doubled_ones_not_guessed_between(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw")
    (raw / "events.csv").rename(raw / "event.csv")
    (raw / "documents_meta.csv").unlink()
    with pytest.raises(DataError, match=r"raw: not Outbrain's tables: 2 problems") as caught:
        prepare(raw, tmp_path / "out", **BY_HAND)
    assert caught.value.problems == (
        "documents_meta.csv is missing, and documents_meta.csv.zip too",
        "events.csv is missing, and events.csv.zip too (did you mean 'event.csv'?)",
    )
    write(tmp_path / "raw" / "again")
    with pytest.raises(DataError, match=r"clicks_train\.csv stands in several places: .*; name the folder you mean"):
        prepare(raw, tmp_path / "out", **BY_HAND)
    with pytest.raises(DataError, match=r"page_views\.csv is missing"):
        prepare(tmp_path / "raw" / "again", tmp_path / "out", page_views=True)
    with pytest.raises(DataError, match="no such file or folder; expected Outbrain's tables in a folder or a zip"):
        prepare(tmp_path / "nowhere", tmp_path / "out")


def test_damaged_and_wrong_zips_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=r"a\.zip: not a zip file, or damaged \(.*\); download it again"):
        prepare(tmp_path / "a.zip", tmp_path / "out")
    raw = write(tmp_path / "raw")
    (raw / "events.csv").unlink()
    with zipfile.ZipFile(raw / "events.csv.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(DataError, match=r"events\.csv\.zip: holds 'readme\.txt'; expected events\.csv"):
        prepare(raw, tmp_path / "out")


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        ("clicks_train", "901,4,2", r"clicks_train\.csv: line 65: column 'clicked' is 2; expected 0 or 1"),
        ("clicks_train", "888,1,0", r"1 row of clicks, of displays that events\.csv doesn't name, such as \[888\]"),
        ("events", "901,x,1,1,1,US", r"events\.csv: 'display_id' '901' stands more than once; expected one row"),
        ("events", "903,x,1,,1,US", r"events\.csv: line 27: column 'timestamp' has no value"),
        (
            "events",
            "903,x,1,5,one,US",
            r"events\.csv: line 27: column 'platform' is 'one'; expected a whole number, \\N",
        ),
        ("promoted_content", "3,1,1,1", r"promoted_content\.csv: 'ad_id' '3' stands more than once"),
        ("documents_topics", "100,3", r"documents_topics\.csv: line 8: has 2 columns, expected 3"),
    ],
)
def test_malformed_and_contradicting_lines_are_named(table: str, line: str, message: str, tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", **{table: [*TABLES[table], line]})
    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "out", **BY_HAND)
    assert not (tmp_path / "out").exists()


def test_an_ad_that_a_display_names_twice_counts_once_and_as_clicked_if_it_was(
    by_hand: FeatureSpec, tmp_path: Path
) -> None:
    clicks, summary = TABLES["clicks_train"], by_hand.metadata["summary"]
    assert isinstance(summary, Mapping)
    assert summary["repeated_rows"] == 0
    clicked = next(line for line in clicks[1:] if line.endswith(",1"))
    missed = next(line for line in clicks[1:] if line.endswith(",0"))
    # once more each, the clicked one also as not clicked, before its own row: that row is to win
    place = clicks.index(clicked)
    lines = [*clicks[:place], clicked[:-1] + "0", *clicks[place:], clicked, missed]
    again = prepare(write(tmp_path / "raw twice", clicks_train=lines), tmp_path / "again", **BY_HAND)
    assert again.summary["repeated_rows"] == 3
    assert again.summary["rows"] == summary["rows"]
    for split in by_hand.splits:
        assert rows_of(again.spec, split) == rows_of(by_hand, split)


def rows_of(spec: FeatureSpec, split: str) -> list[tuple[int, int, float]]:
    """Display, ad and label of each row, in order."""
    columns = open_split(spec, split, ["group", "ad_id", "label"]).read(0, 10**9)
    return list(zip(*(np.asarray(columns[name]).tolist() for name in ("group", "ad_id", "label")), strict=True))


def test_displays_without_or_with_several_clicks_are_counted(tmp_path: Path) -> None:
    lines = [line.replace("901,2,1", "901,2,0") for line in TABLES["clicks_train"]]
    first = FOLDS[0][0]
    lines = [line.replace(f"{first},2,0", f"{first},2,1") if line.startswith(f"{first},2") else line for line in lines]
    summary = prepare(write(tmp_path / "raw", clicks_train=lines), tmp_path / "out", **BY_HAND).summary
    counts = [summary[name] for name in ("displays", "displays_without_click", "displays_with_several_clicks")]
    assert counts == [25, 1, 1]
    assert summary["rows"] == {"train": 60, "test": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folds": 1}, "folds 1 leaves no row to take click rates from; give 2 or more, or 0 as published"),
        ({"cardinalities": {"adid": 5}}, r"unknown hashed feature 'adid' \(did you mean 'ad_id'\?\); known: 'ad_id'"),
        (
            {"cardinalities": {"ad_id": 1}},
            "the cardinality of 'ad_id' is 1; expected 2 or more: id 0 is what is missing",
        ),
    ],
)
def test_settings_that_make_no_sense_are_said(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.model_validate(settings)
