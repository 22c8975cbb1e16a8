"""Specification files for tests: every shape in use, and every way to break one."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec.base.errors import SpecError
from recspec.feature_spec import FeatureSpec
from recspec.feature_spec.sections import CHANNELS

EXAMPLE = """\
feature_spec:
  user_gender: {dtype: torch.int8, cardinality: 3}
  user_age:    {dtype: torch.int8}          # no cardinality: numeric
  user_id:     {dtype: torch.int32, cardinality: 2655}
  item_id:     {dtype: torch.int32, cardinality: 856}
  label:       {dtype: torch.float32}
source_spec:
  train:
    - {type: csv, features: [user_gender, user_age], files: [train_data_0_0.csv, train_data_0_1.csv]}
    - {type: csv, features: [user_id, item_id, label], files: [train_data_1.csv]}
  test:
    - {type: csv, features: [user_id, item_id, label, user_gender, user_age], files: [test_data.csv]}
channel_spec:
  numeric_inputs: [user_age]
  categorical_user_inputs: [user_gender, user_id]
  categorical_item_inputs: [item_id]
  label_ch: [label]
"""
# Made up, each in the shape of a family of files that people have.
NCF_CSV = """\
feature_spec:
  user:
    cardinality: auto
  item:
    cardinality: auto
  label:

metadata:
  test_samples_per_series: 3

source_spec:
  train:
    - type: csv
      features:
        - user
        - item
        - label
      files:
        - a.csv # no header
        - b.csv
  test:
    - type: csv
      features: [user, item, label]
      files: [c.csv]

channel_spec:
  user_ch:
    - user
  item_ch:
    - item
  label_ch:
    - label
"""
NCF_TENSORS = """\
feature_spec:
  user: {dtype: torch.int64, cardinality: 7}
  item: {dtype: torch.int64, cardinality: 9}
  label: {dtype: torch.float32}
metadata: {test_samples_per_series: 101}
source_spec:
  train:
    - {type: torch_tensor, features: [user, item], files: [train_data_0.pt]}
    - {type: torch_tensor, features: [label], files: [train_data_1.pt]}
channel_spec: {user_ch: [user], item_ch: [item], label_ch: [label]}
"""
DLRM_BINARY = """\
channel_spec:
  categorical:
  - cat_0.bin
  - cat_1.bin
  label:
  - label
  numerical: &id001
  - num_0
  - num_1
feature_spec:
  cat_0.bin:
    cardinality: 10
    dtype: int8
  cat_1.bin:
    cardinality: 40000
    dtype: int32
  label:
    dtype: bool
  num_0:
    dtype: float16
  num_1:
    dtype: float16
metadata: {}
source_spec:
  train:
  - features: *id001
    files:
    - train/numerical.bin
    type: split_binary
  - features: [label]
    files: [train/label.bin]
    type: split_binary
  - features: [cat_0.bin]
    files: [train/cat_0.bin]
    type: split_binary
  - features: [cat_1.bin]
    files: [train/cat_1.bin]
    type: split_binary
"""
DLRM_SYNTHETIC = """\
channel_spec: {categorical: [cat_0, cat_1], numerical: [num_0], label: [label]}
feature_spec:
  cat_0: {dtype: int32, cardinality: 10, hotness: 1, alpha: 1.45}
  cat_1: {dtype: int32, cardinality: 20, hotness: 8, alpha: 1.45}
  num_0: {dtype: float16}
  label: {dtype: int8}
metadata:
source_spec: null
"""
WIDE_DEEP = """\
channel_spec:
  label: [clicked]
  map: [display_id]
  multihot_categorical: [topics, entities]
  numerical: [ctr]
  onehot_categorical: []
feature_spec:
  clicked: {}
  ctr: {}
  display_id: {}
  topics: {cardinality: 350, max_hotness: 3}
  entities: {cardinality: 10000, max_hotness: 10}
metadata: {}
source_spec:
  train:
  - {features: [clicked, topics, entities, ctr], files: [train/0.parquet, train/1.parquet], type: parquet}
  test:
  - {features: [clicked, topics, entities, ctr, display_id], files: [valid/0.parquet], type: parquet}
"""
SIM_HISTORIES = """\
channel_spec:
  label: [label]
  user_features: [user]
  target_item_features: [item, category]
  positive_history: [items, categories]
  negative_history: [other_items, other_categories]
feature_spec:
  label: {dtype: bool}
  user: {dtype: int64, cardinality: 100}
  item: {dtype: int64, cardinality: 50}
  category: {dtype: int64, cardinality: 5}
  items: {dtype: int64, cardinality: 50, dimensions: [100], vocabulary: item, padding: 0}
  categories: {dtype: int64, cardinality: 5, dimensions: [100], vocabulary: category, padding: 0}
  other_items: {dtype: int64, cardinality: 50, dimensions: [100], vocabulary: item, padding: 0}
  other_categories: {dtype: int64, cardinality: 5, dimensions: [100], vocabulary: category, padding: 0}
source_spec:
  train:
  - features: [label, user, item, category, items, categories, other_items, other_categories]
    files: [train/part_0.tfrecord, train/part_1.tfrecord]
    type: tfrecord
"""
SHAPES = {
    "example": EXAMPLE,
    "ncf csv": NCF_CSV,
    "ncf tensors": NCF_TENSORS,
    "dlrm": DLRM_BINARY,
    "dlrm synthetic": DLRM_SYNTHETIC,
    "wide and deep": WIDE_DEEP,
    "sim": SIM_HISTORIES,
}


def load(folder: Path, text: str, **options: bool) -> FeatureSpec:
    (folder / "feature_spec.yaml").write_text(text, encoding="utf-8")
    return FeatureSpec.load(folder, **options)


def refused(folder: Path, text: str) -> list[str]:
    """What is said about a file, problem by problem."""
    with pytest.raises(SpecError) as caught:
        load(folder, text)
    assert str(caught.value).startswith(f"{folder / 'feature_spec.yaml'}: ")
    return list(caught.value.problems)


def spec_of(**features: dict[str, object]) -> FeatureSpec:
    """A specification with these features in the role context, and a label."""
    data = {"feature_spec": {**features, "label": {}}, "channel_spec": {"context": list(features), "label": ["label"]}}
    return FeatureSpec.from_dict(data)


BASE = """\
feature_spec:
  user: {dtype: int32, cardinality: 5}
  item: {cardinality: 4}
  price: {}
  label: {}
source_spec:
  train:
  - {type: csv, features: [user, item], files: [a.csv]}
  - {type: csv, features: [price, label], files: [b.csv]}
channel_spec:
  user: [user]
  item: [item]
  context: [price]
  label: [label]
"""
# What stands in BASE, what stands there instead, and what is said about it: line, place, sentence. docs/feature_spec.md
# shows some of them.
BROKEN: dict[str, tuple[str, str, str]] = {
    "unknown section": (
        "feature_spec:\n  user",
        "features: {}\nfeature_spec:\n  user",
        (
            "line 1: features: unknown section 'features' (did you mean 'feature_spec'?); known: 'feature_spec', "
            "'source_spec', 'channel_spec', 'metadata'"
        ),
    ),
    "section of another kind": (
        "channel_spec:\n  user: [user]\n  item: [item]\n  context: [price]\n  label: [label]\n",
        "channel_spec: [user, item]\n",
        "line 10: channel_spec: is ['user', 'item']; expected a mapping, one `name: ...` a line",
    ),
    "name that is no text": (
        "  price: {}",
        "  price: {}\n  no: {}",
        "line 1: feature_spec.False: the name False is not text; put it in quotes (no, on, 1 are not text in YAML)",
    ),
    "duplicate feature": (
        "  price: {}",
        "  price: {}\n  item: {}",
        "line 5: feature_spec.item: appears twice, first in line 3; remove one",
    ),
    "vocabulary of another cardinality": (
        "{dtype: int32, cardinality: 5}",
        "{cardinality: 5, vocabulary: item}",
        "line 2: feature_spec.user.cardinality: is 5, but it shares the vocabulary 'item' whose cardinality is 4",
    ),
    "vocabulary that names another": (
        "  user: {dtype: int32, cardinality: 5}\n  item: {cardinality: 4}",
        "  user: {cardinality: 4, vocabulary: item}\n  item: {cardinality: 4, vocabulary: thing}",
        (
            "line 2: feature_spec.user.vocabulary: is 'item', a feature that itself names the vocabulary 'thing'; "
            "name 'thing' here too"
        ),
    ),
    "chunk that is no mapping": (
        "{type: csv, features: [user, item], files: [a.csv]}",
        "a.csv",
        "line 8: source_spec.train[0]: is 'a.csv'; expected a chunk: a mapping with type, features and files",
    ),
    "unknown chunk type": (
        "{type: csv, features: [user",
        "{type: cvs, features: [user",
        (
            "line 8: source_spec.train[0].type: unknown chunk type 'cvs' (did you mean 'csv'?); known: 'csv', "
            "'parquet', 'split_binary', 'torch_tensor', 'tfrecord'"
        ),
    ),
    "chunk without files": (", files: [b.csv]", "", "line 9: source_spec.train[1].files: is missing"),
    "chunk with an unknown feature": (
        "features: [user, item]",
        "features: [user, item, itme]",
        (
            "line 8: source_spec.train[0].features[2]: unknown feature 'itme' (did you mean 'item'?); known: 'user', "
            "'item', 'price', 'label'"
        ),
    ),
    "list in a channel of scalars": (
        "  label: {}",
        "  label: {length: 2}",
        "line 14: channel_spec.label[0]: 'label' is a list, but the channel 'label' holds one value a row",
    ),
    "no label": (
        "  label: [label]\n",
        "",
        "line 10: channel_spec.label: expected a label feature; found none",
    ),
    "two groups": (
        "  context: [price]",
        "  context: [price]\n  group: [user]\n  map: [item]",
        "line 14: channel_spec.group: expected at most one group feature; found 'user', 'item'",
    ),
    "feature of user and item": (
        "  item: [item]",
        "  item: [item, user]",
        "line 12: channel_spec.item[1]: 'user' is in the role 'user' too; a feature describes the user or the item",
    ),
}
IN_PLACE: dict[tuple[str, str, str], dict[str, str]] = {
    ("{cardinality: 4}", "{%s}", "line 3: feature_spec.item"): {
        "cardinalty: 4": (
            ".cardinalty: unknown key 'cardinalty' (did you mean 'cardinality'?); known: 'dtype', 'cardinality', "
            "'length', 'vector', 'vocabulary', 'padding', 'alpha', 'dimensions', 'max_hotness', 'hotness', 'max_len'"
        ),
        "cardinality: 4, dtype: float32": (
            ".dtype: is float32, but a feature with a cardinality holds ids; expected an integer dtype"
        ),
        "cardinality: 0": ".cardinality: is 0; expected a number of ids, 1 or more, or 'auto'",
        "cardinality: 129, dtype: int8": (
            ".cardinality: is 129, but ids up to 128 do not fit int8, whose largest value is 127; use a wider dtype"
        ),
        "cardinality: 99999999999999999999": (
            ".cardinality: is 99999999999999999999; expected at most 9223372036854775807"
        ),
        "cardinality: 4, length: 2, vector: true": (
            ".vector: is given, but the feature has a cardinality; a vector holds numbers, not ids"
        ),
        "cardinality: 4, padding: -1": (
            ".padding: is -1; expected 0, the one id that can be padding; leave it out where the files pad with -1 or "
            "not at all"
        ),
        "cardinality: 4, vocabulary: 3": ".vocabulary: is 3; expected the name of an id space",
        "cardinality: 4, alpha: 0": ".alpha: is 0; expected a number above 0",
    },
    ("price: {}", "price: %s", "line 4: feature_spec.price"): {
        "float32": ": is 'float32'; expected a mapping such as {dtype: int32, cardinality: 100}, or nothing",
        "{dtype: flaot32}": (
            ".dtype: is 'flaot32' (did you mean 'float32'?); expected one of bool, int8, int16, int32, int64, uint8, "
            "uint16, uint32, float16, float32, float64"
        ),
        "{dimensions: [3, 4]}": ".length: is [3, 4]; expected the most values a row holds, 1 or more",
        "{length: 3, hotness: 4}": ": its length is given as 'length', 'hotness'; expected one of them",
        "{length: 3, vector: 3}": (
            ".vector: is 3; expected true, for numbers of which every row holds exactly `length`; or leave it out"
        ),
        "{vector: true}": (
            ".vector: is given, but the feature has no length; give the number of values of every row as `length`"
        ),
        "{length: 2, padding: 0}": ".padding: is given, but the feature has no cardinality; only ids have one",
    },
    ("  train:\n", "  test: %s\n  train:\n", "line 7: source_spec.test"): {
        "[]": ": has no chunk; expected at least one with type, features and files, or leave the split out",
        "{type: csv}": ": is {'type': 'csv'}; expected a list of chunks, each with type, features and files",
    },
    ("files: [b.csv]", "%s", "line 9: source_spec.train[1]"): {
        "files: [b.csv], header: true": ".header: unknown key 'header'; known: 'type', 'features', 'files'",
        "files: []": ".files: is empty; expected at least one name",
        "files: b.csv": ".files: is 'b.csv'; expected a list of names, such as [a, b]",
        "files: [7]": ".files[0]: is 7; expected a name; put it in quotes (no, on, 1 are not text in YAML)",
        'files: ["b\\0.csv"]': ".files[0]: 'b\\x00.csv' is not the name of a file",
    },
    ("features: [price, label]", "features: %s", "line "): {
        "[price, label, user]": (
            "9: source_spec.train[1].features[2]: feature 'user' appears more than once in the split 'train'; "
            "expected once"
        ),
        "[label]": (
            "7: source_spec.train: no chunk holds the feature 'price' of the channel 'context'; every split holds "
            "every feature that a channel names"
        ),
    },
    ("context: [price]", "%s", "line 13: channel_spec."): {
        "contxt: [price]": "contxt: unknown channel 'contxt' (did you mean 'context'?); known: "
        + ", ".join(map(repr, CHANNELS)),
        "context: price": "context: is 'price'; expected a list of names, such as [a, b]",
        "context: [price, prices]": (
            "context[1]: unknown feature 'prices' (did you mean 'price'?); known: 'user', 'item', 'price', 'label'"
        ),
        "context: [price, price]": (
            "context[1]: feature 'price' appears more than once in the channel 'context'; expected once"
        ),
        "numerical: [item]": "numerical[0]: 'item' has a cardinality, but the channel 'numerical' holds numbers",
        "history: [price]": (
            "history[0]: 'price' has no length, but the channel 'history' holds lists; give feature_spec.price.length"
        ),
        "context: [label]": "context[0]: 'label' is a label; it can't be an input too",
    },
    ("channel_spec:\n", "metadata: {%s}\nchannel_spec:\n", "line 10: metadata."): {
        "test_samples_per_series: many": "test_samples_per_series: is 'many'; expected a number of rows, 1 or more",
        "user_id: usr": (
            "user_id: unknown feature 'usr' (did you mean 'user'?); known: 'user', 'item', 'price', 'label'"
        ),
        "item_id: user": (
            "item_id: is 'user'; expected a feature in the role 'item' that has a cardinality and is no list"
        ),
        "cut_offs: 12": "cut_offs: is 12; expected a list of whole numbers from 1, such as [12]",
        "train_negatives: some": "train_negatives: is 'some'; expected a number of rows, 0 or more",
        "build: {number: 99999999999999999999}": (
            "build.number: holds 99999999999999999999; an integer of metadata has at most 64 bits: put it in quotes"
        ),
        "leak: price": "leak: is 'price', which plays a role; a model must not read what gives the label away",
        "event_weight: user": "event_weight: is 'user'; expected a feature that has no cardinality and is no list",
        "event_weight: price": "event_weight: is 'price', which plays a role; take it out of channel_spec",
        "encoders: [encoders.json]": "encoders: is ['encoders.json']; expected a path beside the specification",
        "catalogues: items.parquet": (
            "catalogues: is 'items.parquet'; expected a mapping from 'user' or 'item' to a file, such as {item: "
            "items.parquet}"
        ),
    },
}
BROKEN |= {
    there: (old, new % there, place + said)
    for (old, new, place), cases in IN_PLACE.items()
    for there, said in cases.items()
}
