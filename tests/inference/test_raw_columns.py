"""Raw columns of a catalogue: display columns or decoded features; what a form needs to know about a column."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import BundleError, RequestError
from recspec.data.encoding import (
    BucketEncoder,
    CrossEncoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    VectorEncoder,
    Vocabulary,
    VocabularyEncoder,
)
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.inference import RawCatalogue, filters
from recspec.inference.filters import TestedColumn
from recspec.inference.ranking import by_values
from recspec.inference.raw_columns import (
    LONGEST_IMAGE,
    MOST_VALUES,
    ColumnFacts,
    decoded_numbers,
    facts_of_encoder,
    facts_of_values,
    shown_values,
)

ITEMS = """\
sku,title,price,kind,labels,in_stock,since
a,One,10,shoes,red|blue,true,2024-01-31
b,Two,49.99,socks,red,false,2023-05-01
c,Three,,shoes,,true,2022-01-01
d,Four,50,,green,true,2024-02-01
e,Five,1250.5,hats,blue|red,false,2024-03-01
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of five items, whose price and kind are features."""
    raw = tmp_path_factory.mktemp("shop")
    rows = [f"u{user},{sku},{user * 10 + place}" for user in range(9) for place, sku in enumerate("abcde")]
    (raw / "rows.csv").write_text("user,sku,time\n" + "\n".join(rows) + "\n")
    (raw / "items.csv").write_text(ITEMS)
    table = DATASETS["table"]
    settings = table.Settings(  # type: ignore[call-arg]
        user="user",
        item="sku",
        timestamp="time",
        items="items.csv",
        item_features=("price", "kind", "labels"),
        lists=("labels",),
    )
    table.prepare(PrepareContext(raw / "rows.csv", raw / "data"), settings)
    return raw / "data"


def opened(folder: Path) -> RawCatalogue:
    return RawCatalogue(FeatureSpec.load(folder), Encoders.load(folder))


def without_display(folder: Path, target: Path) -> Path:
    """A copy whose catalogue holds features and nothing else."""
    shutil.copytree(folder, target)
    spec = FeatureSpec.load(target)
    table = pq.read_table(target / "items.parquet")
    pq.write_table(
        table.select([name for name in table.column_names if name in spec.features]), target / "items.parquet"
    )
    return target


def found(catalogue: RawCatalogue, text: str) -> str:
    """The items that a filter keeps, as one text."""
    mask = catalogue.mask(text)
    assert mask.shape == (6,)
    assert not mask[0]
    return "".join("abcde"[place - 1] for place in np.flatnonzero(mask))


def test_display_columns_are_what_filters_read(shop: Path) -> None:
    catalogue = opened(shop)
    assert found(catalogue, "in_stock and price < 50") == "a"
    assert found(catalogue, "price <= 50 or kind == 'hats'") == "abde"
    assert found(catalogue, "price == 49.99") == "b"
    assert found(catalogue, "title contains 'T' and since < '2023-01-01'") == "c"
    assert found(catalogue, "kind is missing or price is missing") == "cd"
    assert found(catalogue, "item_id in ('a', 'e') and sku != 'a'") == "e"
    assert {"price", "kind", "title", "item_id", "sku"} <= set(catalogue.columns)


def test_features_are_decoded_where_there_is_no_display_column(shop: Path, tmp_path: Path) -> None:
    catalogue = opened(without_display(shop, tmp_path / "data"))
    assert found(catalogue, "price < 50") == "ab"
    assert found(catalogue, "price >= 50") == "de"
    assert found(catalogue, "price in (49.99, 1250.5)") == "be"
    assert found(catalogue, "price is missing") == "c"
    assert found(catalogue, "kind in ('shoes', 'hats')") == "ace"
    assert found(catalogue, "kind is missing") == "d"
    assert found(catalogue, "labels contains 'red'") == "abe"
    assert found(catalogue, "sku > 'b'") == "cde"
    with pytest.raises(RequestError, match=r"no column 'prise' \(did you mean 'price'\?\); columns of the catalogue: "):
        catalogue.mask("prise < 50")


def test_a_list_is_its_raw_values_and_not_the_text_that_spells_it(shop: Path) -> None:
    catalogue = opened(shop)
    assert found(catalogue, "labels contains 'red'") == "abe"
    assert found(catalogue, "labels contains 'e' or labels contains 'd|b' or labels contains ''") == ""
    assert found(catalogue, "labels not contains 'red'") == "d"
    assert found(catalogue, "labels is missing") == "c"
    assert found(catalogue, "labels_text contains 'd|b'") == "a"
    for text in ("labels == 'red'", "labels in ('red', 'blue')"):
        with pytest.raises(RequestError, match="column 'labels' holds lists; test it by `labels contains VALUE`"):
            catalogue.mask(text)
    assert catalogue.column("labels").to_pylist() == [["red", "blue"], ["red"], None, ["green"], ["blue", "red"]]
    assert [name for name in catalogue.distinct if "label" in name] == ["labels"]
    assert by_values(catalogue.column("labels"))(0).tolist() == [1, 0.5, 0, 0, 1]  # the share that both hold


def test_values_that_the_vocabulary_lacks_stay_in_a_list(shop: Path, tmp_path: Path) -> None:
    shutil.copytree(shop, tmp_path / "data")
    table = pq.read_table(tmp_path / "data" / "items.parquet")
    texts = pa.array(["red|never seen", "", None, "|", "blue"])
    place = table.column_names.index("labels_text")
    pq.write_table(table.set_column(place, "labels_text", texts), tmp_path / "data" / "items.parquet")
    catalogue = opened(tmp_path / "data")
    assert catalogue.column("labels").to_pylist() == [["red", "never seen"], [], None, [], ["blue"]]
    assert found(catalogue, "labels contains 'never seen'") == "a"


def test_a_column_is_made_ready_for_tests_once(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue, read, number = opened(shop), list[str](), filters._number
    monkeypatch.setattr(filters, "_number", lambda text: read.append(text) or number(text))
    texts = TestedColumn(pa.array(["1", "2", "3", "4", "5"]))
    monkeypatch.setattr(catalogue, "_tested", {"title": texts})
    assert found(catalogue, "title in (1, 2)") + found(catalogue, "title > 3 or title == 1") == "abade"
    assert len(read) == 5


def test_a_text_that_is_not_utf_8_is_refused_with_its_column(shop: Path, tmp_path: Path) -> None:
    shutil.copytree(shop, tmp_path / "data")
    table = pq.read_table(tmp_path / "data" / "items.parquet")
    place = table.column_names.index("title")
    texts = pa.array([b"\xff\xfe"] * 5).view(pa.string())
    pq.write_table(table.set_column(place, "title", texts), tmp_path / "data" / "items.parquet")
    with pytest.raises(BundleError, match=r"items\.parquet: column 'title': damaged: .*Invalid UTF8"):
        opened(tmp_path / "data").mask("title == 'x'")


def test_hashed_features_can_not_be_filtered_by(shop: Path, tmp_path: Path) -> None:
    folder = without_display(shop, tmp_path / "data")
    encoders = (folder / "encoders.json").read_text()
    spec = FeatureSpec.load(folder)
    cardinality = spec.features["kind"].cardinality
    changed = json.loads(encoders)
    changed["kind"] = {"kind": "hash", "cardinality": cardinality}
    (folder / "encoders.json").write_text(json.dumps(changed))
    with pytest.raises(RequestError) as error:
        opened(folder).mask("kind == 'shoes' and prices > 1")
    assert str(error.value).startswith(
        "filter: 2 problems\n  - character 1: column 'kind' is hashed, so its raw values"
    )
    assert "character 21: no column 'prices' (did you mean 'price'?)" in str(error.value)


def test_a_dataset_that_recspec_did_not_prepare_has_ids_and_numbers() -> None:
    features = {
        "user": {"dtype": "int32", "cardinality": 3},
        "item": {"dtype": "int32", "cardinality": 4},
        "label": {"dtype": "float32"},
    }
    channels = {"user_ch": ["user"], "item_ch": ["item"], "label_ch": ["label"]}
    spec = FeatureSpec.from_dict(
        {"feature_spec": features, "source_spec": {}, "channel_spec": channels, "metadata": {}}
    )
    catalogue = RawCatalogue(spec, None)
    assert catalogue.mask("item >= 2").tolist() == [False, False, True, True]
    assert catalogue.columns == ("item",)


def test_a_damaged_catalogue_is_named(shop: Path, tmp_path: Path) -> None:
    folder = without_display(shop, tmp_path / "data")
    spec, encoders = FeatureSpec.load(folder), Encoders.load(folder)
    pq.write_table(pq.read_table(folder / "items.parquet").slice(1), folder / "items.parquet")
    with pytest.raises(BundleError, match=r"items\.parquet: has 4 rows; expected 5, one for each item"):
        RawCatalogue(spec, encoders).mask("price < 5")
    (folder / "items.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(BundleError, match=r"items\.parquet: damaged"):
        RawCatalogue(spec, encoders).mask("price < 5")


@pytest.mark.parametrize(
    "encoder",
    [
        ScaleEncoder(mean=3.25, std=7.5),
        ScaleEncoder(mean=1.5, std=0.7, log1p=True),
        ScaleEncoder(mean=1.5, std=0.7, log_plus=100.0),
        NumberEncoder(),
        NumberEncoder(log1p=True),
    ],
)
def test_numbers_are_decoded_to_the_digits_that_float32_kept(encoder: ScaleEncoder | NumberEncoder) -> None:
    raw = [0.01, 1.0, -3.5, 49.99, 50.0, 1999.95, 123456.0]
    encoded = Encoders({"x": encoder}).encode_column("x", raw)
    decoded = decoded_numbers(encoder, np.asarray(encoded)).to_pylist()
    assert decoded == pytest.approx(raw, rel=2e-5, abs=1e-4)
    assert decoded[4] == 50.0


def test_the_mean_of_a_scale_counts_as_missing() -> None:
    encoder = ScaleEncoder(mean=4, std=2)
    assert decoded_numbers(encoder, np.array([0, 1], np.float32)).to_pylist() == [None, 6]
    known = ScaleEncoder(mean=4, std=2, missing=4)
    assert decoded_numbers(known, np.array([0, 1], np.float32)).to_pylist() == [4, 6]
    assert pa.types.is_float64(decoded_numbers(known, np.zeros(0, np.float32)).type)


PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

COLUMNS: dict[str, tuple[Any, ColumnFacts]] = {
    "few texts": (pa.array(["b", "a", "a", None, "", "b", "a"]), ColumnFacts("x", "choice", ("a", "b"))),
    "a dictionary of texts": (
        pa.array(["b", "a", "a", "b"]).dictionary_encode(),
        ColumnFacts("x", "choice", ("a", "b")),
    ),
    "texts that are hardly twice there": (pa.array(["a", "b", "c", "a", "d"]), ColumnFacts("x", "text")),
    "many texts": (pa.array([str(n % (MOST_VALUES + 1)) for n in range(1000)]), ColumnFacts("x", "text")),
    "long texts": (pa.array(["a" * 101] * 9), ColumnFacts("x", "text")),
    "no text": (pa.array(["", None], pa.string()), ColumnFacts("x", "other")),
    "nothing": (pa.nulls(3), ColumnFacts("x", "other")),
    "lists in one text": (
        pa.array(["new|eco", "eco", "", "new|eco", "eco"]),
        ColumnFacts("x", "choices", ("eco", "new")),
    ),
    "lists": (pa.array([["a"], ["a", "b"], None, ["b", "a"]]), ColumnFacts("x", "choices", ("a", "b"))),
    "a vector": (pa.array([[0.5, 1.0]] * 3), ColumnFacts("x", "other")),
    "whole numbers": (pa.array([3, None, 7]), ColumnFacts("x", "number", (), 3.0, 7.0, is_whole=True)),
    "numbers": (pa.array([0.5, float("nan"), 7.0]), ColumnFacts("x", "number", (), 0.5, 7.0)),
    "decimals": (pa.array([Decimal("1.25"), Decimal("9.50")]), ColumnFacts("x", "number", (), 1.25, 9.5)),
    "no number": (pa.array([float("nan"), float("inf")]), ColumnFacts("x", "other")),
    "truths": (pa.array([True, None]), ColumnFacts("x", "truth")),
    "truths as numbers": (pa.array([1, 0, 1]), ColumnFacts("x", "truth")),
    "times": (
        pa.array([datetime(2024, 3, 1, 23, tzinfo=UTC), datetime(2023, 1, 2, tzinfo=UTC)]),
        ColumnFacts("x", "date", (), "2023-01-02", "2024-03-01"),
    ),
    "days": (pa.array([date(2024, 3, 1), None]), ColumnFacts("x", "date", (), "2024-03-01", "2024-03-01")),
    "days as texts": (
        pa.array(["2024-03-01", "2023-01-02 10:00", None]),
        ColumnFacts("x", "date", (), "2023-01-02", "2024-03-01"),
    ),
    "addresses of pictures": (
        pa.array(["https://a.example/1.PNG", "http://b.example/2.jpg?w=9", PIXEL.replace("gif", "png")][:2]),
        ColumnFacts("x", "image"),
    ),
    "other addresses": (pa.array(["https://a.example/1", "https://a.example/2"]), ColumnFacts("x", "text")),
    "a script": (
        pa.array(["javascript:alert(1)//.png"] * 2),
        ColumnFacts("x", "choice", ("javascript:alert(1)//.png",)),
    ),
    "bytes": (pa.array([b"a", b"b"]), ColumnFacts("x", "other")),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_the_values_of_a_column_tell_its_kind(case: str) -> None:
    column, expected = COLUMNS[case]
    assert facts_of_values("x", column) == expected
    assert facts_of_values("x", pa.chunked_array([column.slice(0, 1), column.slice(1)])) == expected


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("image", ["https://a.example/1", PIXEL], "image"),
        ("Image_URL", ["https://a.example/1", None], "image"),
        ("poster", ["ftp://a.example/1.png", "https://a.example/2.png"], "text"),
        ("image", ["data:image/svg+xml;base64,PHN2Zz4=", PIXEL], "text"),
        ("image", ["data:text/html;base64,AAAA", PIXEL], "text"),
        ("image", ["/pictures/1.png", "/pictures/2.png"], "text"),
        ("homepage", ["https://a.example/1", "https://a.example/2"], "text"),
    ],
)
def test_pictures_are_addresses_under_a_known_name_or_with_a_known_ending(
    name: str, values: list[str | None], kind: str
) -> None:
    assert facts_of_values(name, pa.array(values)).kind == kind


def test_values_are_shown_within_limits() -> None:
    def shown(kind: Any, *values: Any) -> list[Any]:
        return shown_values(ColumnFacts("x", kind), values)

    assert shown("text", "a" * 301, None, "b") == ["a" * 299 + "…", None, "b"]
    assert shown("number", 1.5, float("nan"), Decimal("2.5"), 3) == [1.5, None, 2.5, 3]
    assert shown("truth", 1, 0, None, True) == [True, False, None, True]
    assert shown("choices", "a||b", ["c"] * 30, "", None) == [["a", "b"], ["c"] * 20, [], None]
    assert shown("date", date(2024, 1, 2), "2024-01-03") == ["2024-01-02", "2024-01-03"]
    long = PIXEL + "A" * LONGEST_IMAGE
    assert shown("image", PIXEL, "javascript:alert(1)", "//a.example/1.png", 5, long, "HTTPS://a.example/1") == [
        PIXEL,
        None,
        None,
        None,
        None,
        "HTTPS://a.example/1",
    ]
    assert shown("text", b"\xff") == [None]


ENCODED: dict[str, tuple[Callable[[], Any], ColumnFacts]] = {
    "few values": (
        lambda: VocabularyEncoder(vocabulary="few"),
        ColumnFacts("x", "choice", ("a", "b"), example="a"),
    ),
    "few values of a list": (
        lambda: VocabularyEncoder(vocabulary="few", length=2),
        ColumnFacts("x", "choices", ("a", "b")),
    ),
    "many values": (lambda: VocabularyEncoder(vocabulary="many"), ColumnFacts("x", "text", example="0")),
    "many numbers": (
        lambda: VocabularyEncoder(vocabulary="numbers"),
        ColumnFacts("x", "number", is_whole=True, example=0),
    ),
    "hashed": (lambda: HashEncoder(cardinality=9), ColumnFacts("x", "text")),
    "hashed numbers": (lambda: HashEncoder(cardinality=9, whole=True), ColumnFacts("x", "number", is_whole=True)),
    "buckets": (lambda: BucketEncoder(boundaries=(1.0,)), ColumnFacts("x", "number")),
    "scaled": (
        lambda: ScaleEncoder(mean=0.42345, std=1.0, low=0.0, high=1.0),
        ColumnFacts("x", "number", (), 0.0, 1.0, example=0.423),
    ),
    "hours": (
        lambda: ScaleEncoder(mean=11.5454, std=7.0, low=0.0, high=23.0),
        ColumnFacts("x", "number", (), 0.0, 23.0, example=12.0),
    ),
    "counts": (  # e^2 - 1 = 6.39
        lambda: ScaleEncoder(mean=2.0, std=1.0, log1p=True),
        ColumnFacts("x", "number", example=6.39),
    ),
    "numbers as they are": (lambda: NumberEncoder(), ColumnFacts("x", "number")),
    "a list of numbers": (lambda: NumberEncoder(length=3), ColumnFacts("x", "other")),
    "a vector": (lambda: VectorEncoder(length=3), ColumnFacts("x", "other")),
    "a part of a cross": (
        lambda: CrossEncoder(columns=("x", "y"), cardinality=9, whole=("x",)),
        ColumnFacts("x", "number", is_whole=True),
    ),
}


@pytest.mark.parametrize("case", ENCODED)
def test_an_encoder_tells_what_a_request_may_hold(case: str) -> None:
    encoder, expected = ENCODED[case]
    words = {"few": ["a", "b"], "many": [str(n) for n in range(500)], "numbers": list(range(500))}
    vocabularies = {name: Vocabulary(pa.array(values)) for name, values in words.items()}
    feature = "crossed" if "cross" in case else "x"
    assert facts_of_encoder("x", Encoders({feature: encoder()}, vocabularies)) == expected


def test_a_column_without_an_encoder_is_a_text() -> None:
    assert facts_of_encoder("x", None, is_required=True) == ColumnFacts("x", "text", is_required=True)
    assert facts_of_encoder("x", Encoders({})) == ColumnFacts("x", "text")
