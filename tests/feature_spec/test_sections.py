"""One meaning, many spellings: dtypes, lengths and channels."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from recspec.base.errors import SpecError
from recspec.feature_spec import FeatureSpec
from recspec.feature_spec.sections import CHANNELS, DTYPES, ROLES
from tests.feature_spec.files import spec_of

SPELLED = {
    "np.int32": "int32",
    " INT8 ": "int8",
    "torch.long": "int64",
    "torch.half": "float16",
    "torch.float": "float32",
}
SPELLED |= {"double": "float64", "torch.short": "int16", "torch.int": "int32", "byte": "uint8", "torch.char": "int8"}
SPELLED |= {"np.bool_": "bool", "torch.float": "float32", "<i4": "int32", "?": "bool"}
SPELLED |= {f"{library}{name}": name for name in DTYPES for library in ("", "torch.", "numpy.")}


@pytest.mark.parametrize(("spelling", "meant"), SPELLED.items())
def test_spellings_of_a_dtype(spelling: str, meant: str) -> None:
    assert spec_of(x={"dtype": spelling}).features["x"].dtype == meant


@pytest.mark.parametrize("spelling", ["int46", ">i4", "complex64", "string", "object", "", 5, ["int8"]])
def test_what_is_no_dtype(spelling: object) -> None:
    with pytest.raises(SpecError, match=r"feature_spec.x.dtype: is .*; expected one of bool, int8, int16, "):
        spec_of(x={"dtype": spelling})


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"length": 3}, 3),
        ({"dimensions": [100]}, 100),
        ({"max_hotness": 10}, 10),
        ({"hotness": 2}, 2),
        ({"max_len": 5}, 5),
        ({"dimensions": [1]}, 1),  # a list that holds one value at most is still stored as a list
        ({"hotness": 1}, None),  # files that give every feature a hotness say so of those that are no lists
        ({"hotness": None}, None),
        ({"length": np.int64(4)}, 4),
    ],
)
def test_spellings_of_a_length(given: dict[str, object], length: int | None) -> None:
    feature = spec_of(x={"cardinality": 9, **given}).features["x"]
    assert feature.length == length
    assert feature.is_list == (length is not None)


@pytest.mark.parametrize("channel", CHANNELS)
def test_every_channel_name_is_read(channel: str) -> None:
    rule = CHANNELS[channel]
    feature: dict[str, object] = {}
    if rule.categorical:
        feature["cardinality"] = 9
    if rule.is_list:
        feature["length"] = 4
    data = {"feature_spec": {"x": feature, "y": {}}, "channel_spec": {channel: ["x"]}}
    if rule.role != "label":
        data["channel_spec"]["label"] = ["y"]  # type: ignore[index]
    spec = FeatureSpec.from_dict(data)
    assert spec.role(rule.role) == ("x",)
    assert spec.roles_of("x") == (rule.role,)
    assert FeatureSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec


def test_the_roles_of_published_channel_names() -> None:
    roles = {name: channel.role for name, channel in CHANNELS.items()}
    assert set(ROLES) <= set(roles)
    assert roles["user_ch"] == roles["user_features"] == roles["categorical_user_inputs"] == "user"
    assert roles["item_ch"] == roles["target_item_features"] == roles["categorical_item_inputs"] == "item"
    assert roles["categorical"] == roles["numerical"] == roles["onehot_categorical"] == "context"
    assert roles["multihot_categorical"] == roles["numeric_inputs"] == "context"
    assert roles["positive_history"] == "history"
    assert roles["map"] == "group"
    assert roles["label_ch"] == "label"
