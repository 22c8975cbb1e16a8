"""Raw values of a catalogue: display columns where there are any, decoded features elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import BundleError, RequestError
from recspec.data.encoding import Encoders, NumberEncoder, ScaleEncoder
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.inference import RawCatalogue, filters
from recspec.inference.filters import TestedColumn
from recspec.inference.ranking import by_values
from recspec.inference.raw_columns import decoded_numbers

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
