"""What is said about specifications that are wrong, here and by the JSON Schema for editors."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from recspec.base.errors import SpecError
from recspec.feature_spec import CHUNK_TYPES, Chunk, Feature, FeatureSpec, json_schema
from tests.feature_spec.files import BASE, BROKEN, SHAPES, load, refused


@pytest.mark.parametrize("case", BROKEN)
def test_each_violation_has_its_message(case: str, tmp_path: Path) -> None:
    old, new, message = BROKEN[case]
    assert old in BASE
    assert refused(tmp_path, BASE.replace(old, new, 1)) == [message]


def test_a_vector_is_no_list_of_events(tmp_path: Path) -> None:
    text = BASE.replace("price: {}", "price: {length: 3, vector: true}", 1) + "  history: [price]\n"
    assert refused(tmp_path, text) == [
        (
            f"line {text.count(chr(10))}: channel_spec.history[0]: 'price' is a vector, but the channel 'history' "
            "holds lists with one value for each event"
        )
    ]


def test_vector_false_is_no_key(tmp_path: Path) -> None:
    said = load(tmp_path, BASE.replace("price: {}", "price: {length: 3, vector: false}", 1))
    assert said == load(tmp_path, BASE.replace("price: {}", "price: {length: 3}", 1))
    assert "vector" not in said.to_dict()["feature_spec"]["price"]  # type: ignore[index]


def test_several_violations_are_reported_together_by_line(tmp_path: Path) -> None:
    text = BASE
    for case in ("{dtype: flaot32}", "contxt: [price]", "chunk with an unknown feature", "unknown section"):
        old, new, _ = BROKEN[case]
        text = text.replace(old, new, 1)
    (tmp_path / "feature_spec.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        FeatureSpec.load(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path / 'feature_spec.yaml'}: 4 problems"
    assert [line[:39] for line in lines[1:]] == [
        "  - line 1: features: unknown section '",
        "  - line 5: feature_spec.price.dtype: i",
        "  - line 9: source_spec.train[0].featur",
        "  - line 14: channel_spec.contxt: unkno",
    ]


def test_a_broken_part_causes_no_further_complaints(tmp_path: Path) -> None:
    """Each is reported once, where it is, and not again where something else relies on it."""
    text = BASE.replace("item: {cardinality: 4}", "item: {cardinality: many}").replace(
        "item: [item]", "history: [item]"
    )
    text += "metadata: {item_id: item}\n"
    assert [problem[:44] for problem in refused(tmp_path, text)] == ["line 3: feature_spec.item.cardinality: is 'm"]
    text = BASE.replace("label: [label]", "label: label")
    assert [problem[:40] for problem in refused(tmp_path, text)] == ["line 14: channel_spec.label: is 'label';"]
    text = BASE.replace("files: [a.csv]", "files: a.csv")
    assert [problem[:46] for problem in refused(tmp_path, text)] == ["line 8: source_spec.train[0].files: is 'a.csv'"]


def test_from_dict_says_the_same_without_lines() -> None:
    with pytest.raises(SpecError) as caught:
        FeatureSpec.from_dict({"feature_spec": {"a": {"dtype": "int46"}, 1: {}}, "sources": {}})
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # from one process to another
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)
    assert str(again).splitlines()[0] == "feature specification: 4 problems"
    places = ["channel_spec.label", "feature_spec.1", "feature_spec.a.dtype", "sources"]
    assert [problem.split(":")[0] for problem in caught.value.problems] == places


def test_no_section_at_all_is_said() -> None:
    with pytest.raises(SpecError, match="feature specification: feature_spec: this section is missing"):
        FeatureSpec.from_dict({})
    with pytest.raises(SpecError, match="feature_spec: holds no feature; expected at least a label"):
        FeatureSpec.from_dict({"feature_spec": {}})


def outside(file: str) -> str:
    return BASE.replace("files: [b.csv]", f"files: [{file}]")


@pytest.mark.parametrize("file", ["../b.csv", "sub/../../b.csv", "/etc/hosts"])
def test_files_may_not_lie_outside_the_folder(file: str, tmp_path: Path) -> None:
    assert refused(tmp_path, outside(file)) == [
        (
            f"line 9: source_spec.train[1].files[0]: '{file}' leads outside the folder {tmp_path}; "
            "move it there, or pass --allow-outside"
        )
    ]
    spec = load(tmp_path, outside(file), allow_outside=True)
    assert spec.path(file) == tmp_path / file
    assert spec.replace(metadata={"kept": True}).allow_outside


@pytest.mark.parametrize("file", ["sub/b.csv", "./b.csv", "sub/../b.csv"])
def test_files_may_lie_anywhere_inside_it(file: str, tmp_path: Path) -> None:
    assert load(tmp_path, outside(file)).path(file) == tmp_path / file


def test_a_link_that_leads_outside_is_outside(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.csv").write_text("1,0\n")
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "b.csv").symlink_to(tmp_path / "elsewhere" / "b.csv")
    (inside / "folder").symlink_to(tmp_path / "elsewhere")
    for file in ("b.csv", "folder/b.csv"):
        (problem,) = refused(inside, outside(file))
        assert f"'{file}' leads outside the folder {inside}" in problem
    (inside / "b.csv").unlink()
    (inside / "c.csv").write_text("1,0\n")
    (inside / "b.csv").symlink_to("c.csv")
    load(inside, outside("b.csv"))  # a link within the folder stays inside
    (tmp_path / "link").symlink_to(inside)
    assert load(tmp_path / "link", BASE).folder == tmp_path / "link"  # and the folder itself may be one


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").symlink_to(tmp_path / "c.csv")
    (tmp_path / "c.csv").symlink_to(tmp_path / "b.csv")
    (problem,) = refused(tmp_path, BASE)
    assert "source_spec.train[1].files[0]: 'b.csv' leads into a circle of links" in problem


KEYS = {
    "cardinality": "item: {cardinality: %s}",
    "length": "item: {cardinality: 4, length: %s}",
    "hotness": "item: {cardinality: 4, hotness: %s}",
    "max_hotness": "item: {cardinality: 4, max_hotness: %s}",
    "max_len": "item: {cardinality: 4, max_len: %s}",
    "dimensions": "item: {cardinality: 4, dimensions: [%s]}",
    "padding": "item: {cardinality: 4, padding: %s}",
    "alpha": "item: {cardinality: 4, alpha: %s}",
    "vector": "item: {length: 3, vector: %s}",
    "dtype": "item: {cardinality: 4, dtype: %s}",
    "vocabulary": "item: {cardinality: 4, vocabulary: %s}",
    "key": "item: {cardinality: 4, ? %s : 1}",
    "feature": "? %s : {}",
    "test_samples_per_series": "metadata: {test_samples_per_series: %s}",
    "train_negatives": "metadata: {train_negatives: %s}",
    "cut_offs": "metadata: {cut_offs: [%s]}",
    "user_id": "metadata: {user_id: %s}",
    "catalogues": "metadata: {catalogues: {item: %s}}",
    "any key": "metadata: {summary: [{rows: %s}]}",
    "name in metadata": "metadata: {? %s : 1}",
    "name below metadata": "metadata: {build: {? %s : 1}}",
    "section": "? %s : {}",
}
HEX = "0x" + "f" * 5000  # Python refuses to write it in decimal digits
NUMBERS = ["2147483648", "9223372036854775808", "-9223372036854775809", "0", "true", "1.5", ".nan", HEX]


def test_every_key_of_the_schema_that_takes_a_number_is_tried() -> None:
    schema = json_schema()
    feature = schema["$defs"]["Feature"]["properties"]  # type: ignore[index]
    metadata = schema["properties"]["metadata"]["anyOf"][0]["properties"]  # type: ignore[index]
    numbers = {key for key, found in (feature | metadata).items() if re.search("integer|number", str(found))}
    assert numbers <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_a_number_is_taken_everywhere_or_refused_in_one_sentence(key: str, tmp_path: Path) -> None:
    for number in NUMBERS:
        assert_taken_or_refused(key, number, tmp_path)


def assert_taken_or_refused(key: str, number: str, tmp_path: Path) -> None:
    line = KEYS[key] % number
    part = line.startswith(("metadata", "?")) and key != "feature"
    features = "feature_spec:\n  label: {}\n" + ("  item: {cardinality: 4}\n" if part or key == "feature" else "")
    text = features + (line if part else f"  {line}") + "\nchannel_spec: {label: [label]}\n"
    try:
        spec = load(tmp_path, text)
    except SpecError:
        (told,) = refused(tmp_path, text)
        assert len(told) < 500
        return
    spec.save(tmp_path / "again.yaml")
    again = FeatureSpec.load(tmp_path / "again.yaml")
    assert again.features == spec.features
    assert repr(again.metadata) == repr(spec.metadata)  # nan is not equal to itself
    assert key not in ("length", "test_samples_per_series", "train_negatives", "cut_offs") or number == "0"
    assert number != HEX or key == "alpha"


def test_numbers_of_any_size_are_shown(tmp_path: Path) -> None:
    text = "feature_spec: {label: {}, x: {cardinality: %s}}\nchannel_spec: {label: [label]}\n"
    assert refused(tmp_path, text % HEX) == [
        "line 1: feature_spec.x.cardinality: is an integer of 20,000 bits; expected at most 9223372036854775807"
    ]
    holds = "holds an integer of 20,000 bits; an integer of metadata has at most 64 bits: put it in quotes"
    text = "feature_spec: {label: {}}\nchannel_spec: {label: [label]}\nmetadata: {a: [%s]}\n"
    assert refused(tmp_path, text % HEX) == [f"line 3: metadata.a[0]: {holds}"]


# --- the JSON Schema --------------------------------------------------------------------------------------------------


def schema_errors(text: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_json_schema_accepts_every_shape_in_use(shape: str) -> None:
    assert schema_errors(SHAPES[shape]) == []


def test_the_json_schema_accepts_every_published_file(real_data: Callable[[str], Path]) -> None:
    texts = [file.read_text() for file in sorted(real_data("feature-specs").rglob("*.yaml"))]
    assert [schema_errors(text) for text in texts] == [[]] * len(texts)


@pytest.mark.parametrize(
    "case",
    ["unknown section", "cardinalty: 4", "contxt: [price]", "unknown chunk type", "chunk without files", "no label"],
)
def test_the_json_schema_refuses_what_it_can_see(case: str) -> None:
    old, new, _ = BROKEN[case]
    assert bool(schema_errors(BASE.replace(old, new, 1))) == (case != "no label")  # that takes the whole file


def test_the_json_schema_describes_every_key() -> None:
    schema = json_schema()
    definitions = schema["$defs"]
    for model in (Feature, Chunk):
        properties = definitions[model.__name__]["properties"]  # type: ignore[index]
        assert set(model.model_fields) <= set(properties)
        assert all("description" in found for found in properties.values())
    assert definitions["Chunk"]["properties"]["type"]["enum"] == list(CHUNK_TYPES)  # type: ignore[index]
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
