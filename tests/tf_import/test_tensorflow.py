"""Estimators that TensorFlow trains here, of every kind of column, against their bundles: rows with gaps too.

TensorFlow runs in an environment of its own, as for the optimizers.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recspec.inference.predictor import Predictor
from recspec.tf_import.tensorbundle import TensorBundle, find
from recspec.tf_import.wide_deep import import_tf
from tests.tf_import.test_wide_deep import COLUMNS
from tests.training import test_optimizers_tensorflow

interpreter = test_optimizers_tensorflow.interpreter

ROWS = 400
FLOATS = ("n0", "age")

SCRIPT = """
import json, sys
import numpy as np
import tensorflow as tf

folder, columns = sys.argv[1], json.loads(sys.argv[2])
fc, v1 = tf.feature_column, tf.compat.v1
wide, deep, made = [], [], {}
for c in columns:
    kind, dtype = c["kind"], tf.as_dtype(c.get("dtype", "string"))
    if kind == "numeric":
        normal = (lambda x, c=c: (x - c["mean"]) / c["std"]) if "mean" in c else None
        column = fc.numeric_column(c["name"], normalizer_fn=normal)
    elif kind == "bucketized":
        column = fc.bucketized_column(made[c["key"]], c["boundaries"])
    elif kind == "identity":
        column = fc.categorical_column_with_identity(c["name"], c["num_buckets"], c.get("default_value"))
    elif kind == "hash":
        column = fc.categorical_column_with_hash_bucket(c["name"], c["num_buckets"], dtype)
    elif kind == "vocabulary":
        column = fc.categorical_column_with_vocabulary_list(
            c["name"], c["vocabulary"], num_oov_buckets=c.get("num_oov_buckets", 0))
    else:
        keys = [made[k] if k == "age_bucketized" else k for k in c["keys"]]
        column = fc.crossed_column(keys, c["num_buckets"])
    assert column.name == c["name"], column.name
    made[c["name"]] = column
    if c.get("wide"):
        wide.append(column)
    if c.get("deep"):
        deep.append(column)
    if c.get("indicator"):
        deep.append(fc.indicator_column(column))
    if "embedding_dim" in c:
        deep.append(fc.embedding_column(column, c["embedding_dim"]))

def given(file):
    return {name: array for name, array in np.load(f"{folder}/{file}.npz").items()}

def feed(rows, label=None):
    def build():
        data = tf.data.Dataset.from_tensor_slices(rows if label is None else (rows, label))
        return data.batch(64) if label is None else data.repeat(20).batch(64)
    return build

rows, gaps, absent = given("rows"), given("gaps"), given("absent")
label = rows.pop("label")
dims = {"linear_feature_columns": wide, "dnn_feature_columns": deep, "dnn_hidden_units": [16, 8]}
new = tf.estimator.DNNLinearCombinedClassifier(
    **dims, config=tf.estimator.RunConfig(model_dir=f"{folder}/new", tf_random_seed=3))
cut = v1.estimator.DNNLinearCombinedClassifier(
    **dims, config=v1.estimator.RunConfig(model_dir=f"{folder}/cut", tf_random_seed=3),
    input_layer_partitioner=v1.fixed_size_partitioner(3))
found = {}
for name, estimator in {"new": new, "cut": cut}.items():
    estimator.train(feed(rows, label))
    found[name] = np.array([row["probabilities"][1] for row in estimator.predict(feed(gaps))])
kinds = {name: tf.io.FixedLenFeature([1], tf.float32) if array.dtype.kind == "f"
         else tf.io.VarLenFeature(tf.int64 if array.dtype.kind == "i" else tf.string) for name, array in rows.items()}
receiver = tf.estimator.export.build_parsing_serving_input_receiver_fn(kinds)
exported = new.export_saved_model(f"{folder}/saved", receiver).decode()
examples = []
for row in range(len(label)):
    features = {}
    for name, array in rows.items():
        if name in absent and absent[name][row]:
            continue
        value = array[row]
        features[name] = (
            tf.train.Feature(float_list=tf.train.FloatList(value=[value])) if array.dtype.kind == "f"
            else tf.train.Feature(int64_list=tf.train.Int64List(value=[value])) if array.dtype.kind == "i"
            else tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()])))
    examples.append(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
answer = tf.saved_model.load(exported).signatures["predict"](examples=tf.constant(examples))
found["saved"] = answer["probabilities"].numpy()[:, 1]
np.savez(f"{folder}/found.npz", **found)
reader = tf.train.load_checkpoint(f"{folder}/cut")
names = reader.get_variable_to_shape_map()
np.savez(f"{folder}/variables.npz", **{name.replace("/", "|"): reader.get_tensor(name) for name in names})
"""


@pytest.fixture(scope="module")
def theirs(interpreter: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models, rows and TensorFlow's answers."""
    folder = tmp_path_factory.mktemp("estimators")
    rng = np.random.default_rng(1)
    rows: dict[str, np.ndarray] = {
        "n0": rng.normal(size=ROWS).astype(np.float32),
        "age": rng.uniform(1, 80, ROWS).astype(np.float32),
        "c_id": rng.integers(0, 20, ROWS),
        "c_hash": np.array([f"u{number}" for number in rng.integers(0, 60, ROWS)]),
        "c_vocab": rng.choice(["red", "green", "pink"], ROWS),
        "c_num": rng.choice([5, 10, 99, -7], ROWS),
        "c_ihash": rng.integers(-50, 5000, ROWS),
        "hour": rng.integers(0, 24, ROWS),
    }
    gaps = {name: array.copy() for name, array in rows.items()}
    for start, (name, value) in enumerate(
        [("c_hash", ""), ("c_vocab", ""), ("c_ihash", -1), ("c_id", -1), ("c_id", 77), ("c_num", -1), ("hour", -1)]
    ):
        gaps[name][30 * start : 30 * start + 50] = value
    absent = {name: rng.random(ROWS) < 0.15 for name in rows if name not in FLOATS}
    np.savez(folder / "rows.npz", **rows, label=(rows["n0"] > 0) ^ (rows["c_id"] > 10))
    np.savez(folder / "gaps.npz", **gaps)
    np.savez(folder / "absent.npz", **absent)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    arguments = [interpreter, "-c", SCRIPT, str(folder), json.dumps(COLUMNS)]
    done = subprocess.run(arguments, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "columns.json").write_text(json.dumps({"columns": COLUMNS}))
    return folder


def raw_rows(folder: Path, file: str) -> pa.Table:
    """The rows as raw values; those of `absent` lack what the Examples lacked."""
    rows = np.load(folder / f"{'gaps' if file == 'gaps' else 'rows'}.npz")
    absent = np.load(folder / "absent.npz") if file == "absent" else {}
    return pa.table({name: pa.array(rows[name].tolist(), mask=absent.get(name)) for name in rows if name != "label"})


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rows"), [("new", "gaps"), ("cut", "gaps"), ("saved", "absent")])
def test_a_bundle_answers_as_its_estimator(model: str, rows: str, theirs: Path, tmp_path: Path) -> None:
    path = next((theirs / "saved").iterdir()) if model == "saved" else theirs / model
    made = import_tf(path, tmp_path / "bundle", theirs / "columns.json")
    ours, _ = Predictor.open(made.folder, device="cpu").predict(raw_rows(theirs, rows))
    expected = np.load(theirs / "found.npz")[model]
    assert expected.std() > 0.05
    np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-6)  # ages up to 80 enter as they are


@pytest.mark.slow
def test_variables_that_tensorflow_cut_are_read_to_the_bit(theirs: Path) -> None:
    bundle = TensorBundle.open(find(theirs / "cut").prefix)
    assert sum(bool(entry.slices) for entry in bundle.entries.values()) > 10
    expected = np.load(theirs / "variables.npz")
    assert set(expected) == {name.replace("/", "|") for name in bundle.entries}
    for name in bundle.entries:
        np.testing.assert_array_equal(bundle.read(name), expected[name.replace("/", "|")], err_msg=name)
