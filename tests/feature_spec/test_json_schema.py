"""The JSON Schema for editors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from recspec.feature_spec import CHUNK_TYPES, Chunk, Feature, json_schema
from tests.feature_spec.files import BASE, BROKEN, SHAPES


def schema_errors(text: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_json_schema_accepts_every_shape_in_use(shape: str) -> None:
    assert schema_errors(SHAPES[shape]) == []


def test_the_json_schema_accepts_every_published_file(real_data: Callable[[str], Path]) -> None:
    for file in sorted(real_data("feature-specs").rglob("*.yaml")):
        assert schema_errors(file.read_text()) == [], file


@pytest.mark.parametrize(
    "case",
    ["unknown section", "unknown key", "unknown channel", "unknown chunk type", "chunk without files", "no label"],
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
