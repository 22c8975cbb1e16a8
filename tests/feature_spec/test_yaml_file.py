"""The YAML file: what is written, what is read, and what is said about files that are no specification."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from recspec.base.errors import SpecError
from recspec.feature_spec import Feature, FeatureSpec, model
from tests.feature_spec.files import EXAMPLE, WIDE_DEEP, load, refused


def test_the_file_that_save_writes_is_pinned_byte_for_byte(tmp_path: Path) -> None:
    spec = load(tmp_path, WIDE_DEEP.replace("metadata: {}", "metadata: {dataset: Größe, summary: {rows: 3}}"))
    assert (
        spec.save(tmp_path / "out").read_bytes().decode()
        == """\
feature_spec:
  clicked: {}
  ctr: {}
  display_id:
    dtype: int64
  topics:
    cardinality: 350
    length: 3
  entities:
    cardinality: 10000
    length: 10
source_spec:
  train:
  - type: parquet
    features: [clicked, topics, entities, ctr]
    files: [train/0.parquet, train/1.parquet]
  test:
  - type: parquet
    features: [clicked, topics, entities, ctr, display_id]
    files: [valid/0.parquet]
channel_spec:
  label: [clicked]
  map: [display_id]
  multihot_categorical: [topics, entities]
  numerical: [ctr]
  onehot_categorical: []
metadata:
  dataset: Größe
  summary:
    rows: 3
"""
    )


def test_save_leaves_no_temporary_file_and_replaces_an_older_one(tmp_path: Path) -> None:
    spec = load(tmp_path, EXAMPLE)
    (tmp_path / "named.yml").write_text("old")
    assert spec.save(tmp_path / "named.yml") == tmp_path / "named.yml"
    assert FeatureSpec.load(tmp_path / "named.yml") == spec
    assert spec.save(tmp_path / "v2.0") == tmp_path / "v2.0" / "feature_spec.yaml"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["feature_spec.yaml", "named.yml", "v2.0"]
    assert load(tmp_path, "\ufeff" + EXAMPLE) == spec, "a byte order mark is skipped"


names = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(names, min_size=2, max_size=5, unique=True), st.dictionaries(names, values, max_size=3))
def test_any_names_and_metadata_survive_the_file(features: list[str], metadata: dict[str, object]) -> None:
    reserved = {"test_samples_per_series", "user_id", "item_id", "encoders", "vocabularies", "catalogues"}
    spec = FeatureSpec(
        features={name: Feature(cardinality=number + 1) for number, name in enumerate(features)},
        channels={"label": features[:1], "user": features[1:]},  # type: ignore[dict-item]
        metadata={key: value for key, value in metadata.items() if key not in reserved},
    )
    with TemporaryDirectory() as folder:
        assert FeatureSpec.load(spec.save(folder)) == spec


@given(values, st.booleans())
def test_both_parsers_read_the_same(value: object, flow: bool) -> None:
    """libyaml's, which `load` takes if it can, and PyYAML's own."""
    text = yaml.safe_dump({"k": [value], 1: value}, allow_unicode=True, default_flow_style=flow)
    quick, plain = yaml.CSafeLoader(text), yaml.SafeLoader(text)
    nodes = quick.get_single_node(), plain.get_single_node()
    assert [key.start_mark.line for key, _ in nodes[0].value] == [key.start_mark.line for key, _ in nodes[1].value]
    assert quick.construct_document(nodes[0]) == plain.construct_document(nodes[1])


def test_texts_that_libyaml_may_not_read_go_to_pyyaml() -> None:
    kinds = {
        text: type(model._loader(text))
        for text in ("a: 1", "a: " + "[" * 99 + "]" * 99, "a: [1", "[" * 101 + "]" * 101)
    }
    assert list(kinds.values()) == [yaml.CSafeLoader, yaml.CSafeLoader, yaml.SafeLoader, yaml.SafeLoader]


@pytest.mark.parametrize("name", ["ok.csv", "OK.Parquet", "ok.jsonl", "ok.csv.gz"])
def test_rows_in_place_of_a_specification_are_told_from_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"user_id,item_id\n1,2\n")
    with pytest.raises(SpecError, match=r"holds rows, and is not a specification; prepare it \(recspec prepare table"):
        FeatureSpec.load(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected sections feature_spec, source_spec, channel_spec; found nothing"),
        ("hello", "expected sections feature_spec, source_spec, channel_spec; found 'hello'"),
        ("a: [1, 2\nb: 3\n", "line 2, column 2: not valid YAML: expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: not valid YAML: but found another document"),
        (
            "a: !!python/name:os.system\n",
            (
                "line 1, column 4: not valid YAML: could not determine a constructor for the "
                "tag 'tag:yaml.org,2002:python/name:os.system'"
            ),
        ),
        ("a: 2020-13-45\n", "not valid YAML: month must be in 1..12"),
        ("a: &loop\n  b: *loop\n", "line 1, column 4: not valid YAML: a value that holds itself"),
        ("a: " + "[" * 1500, "not valid YAML: lists and mappings are nested too deeply"),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
            "line 19, column 6: not valid YAML: its aliases make more than 1,000,000 values of it",
        ),
    ],
    ids="empty word bracket tab two_documents object date loop deep bomb".split(),
)
def test_what_is_no_specification(text: str, message: str, tmp_path: Path) -> None:
    assert refused(tmp_path, text) == [f"{tmp_path / 'feature_spec.yaml'}: {message}"]


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    (tmp_path / "feature_spec.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match=r"feature_spec.yaml: can't be read as text: "):
        FeatureSpec.load(tmp_path)
    (tmp_path / "feature_spec.yaml").write_text("a: \x01\n")
    with pytest.raises(SpecError, match=r"feature_spec.yaml: not valid YAML: unacceptable character #x0001"):
        FeatureSpec.load(tmp_path)


def test_a_path_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXAMPLE)
    with pytest.raises(SpecError) as caught:
        FeatureSpec.load(tmp_path / "mien.yaml")
    assert str(caught.value) == f"{tmp_path / 'mien.yaml'}: no such file or folder (did you mean 'mine.yaml'?)"
    with pytest.raises(SpecError) as caught:
        FeatureSpec.load(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: no feature_spec.yaml in this folder, so it is not a prepared dataset; "
        "found 'mine.yaml': name the one you mean"
    )
    with pytest.raises(SpecError, match=r"no such file or folder$"):
        FeatureSpec.load(tmp_path / "nowhere" / "at all")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "feature_spec.yaml").write_text(EXAMPLE)
    (tmp_path / "feature_spec.yaml").chmod(0)
    with pytest.raises(SpecError, match=r"can't be read as text: .*Permission denied"):
        FeatureSpec.load(tmp_path)


def test_a_trained_model_in_place_of_a_dataset_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "bundle.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "bundle"):
        with pytest.raises(SpecError, match="is a trained model, not a prepared dataset; `recspec evaluate RUN DATA`"):
            FeatureSpec.load(folder)
