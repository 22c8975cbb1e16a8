"""The JSON Schema of a specification file, for editors."""

from __future__ import annotations

from collections.abc import Mapping

from recspec.spec.aliases import CHANNELS, DTYPES, LIST_LENGTH_SPELLINGS
from recspec.spec.sections import Metadata, Sections


def json_schema() -> dict[str, object]:
    """JSON Schema of the YAML file; it accepts every spelling that `FeatureSpec.load` reads."""
    schema = Sections.model_json_schema()
    sections = schema["properties"]
    sections["metadata"] |= {"properties": Metadata.model_json_schema()["properties"]}
    sections["channel_spec"]["propertyNames"] = {"enum": list(CHANNELS)}
    feature = schema["$defs"]["Feature"]["properties"]
    length = {"type": "integer", "minimum": 1}
    one_length = {"type": "array", "items": length, "minItems": 1, "maxItems": 1}
    for spelling in LIST_LENGTH_SPELLINGS:
        described = {"description": "another spelling of `length`"}
        feature[spelling] = {**described, "anyOf": [length, one_length, {"type": "null"}]}
    feature["dtype"] = {"type": ["string", "null"], "description": f"one of {', '.join(DTYPES)}; torch. and numpy. too"}
    for section in ("feature_spec", "source_spec", "channel_spec"):  # `label:` with nothing after it is empty
        sections[section]["additionalProperties"] = _or_null(sections[section]["additionalProperties"])
    for section in ("source_spec", "channel_spec", "metadata"):
        sections[section] = _or_null(sections[section])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _or_null(schema: Mapping[str, object]) -> dict[str, object]:
    described = {key: schema[key] for key in ("description", "default") if key in schema}
    return {**described, "anyOf": [{k: v for k, v in schema.items() if k not in described}, {"type": "null"}]}
