"""A TensorFlow model becomes a bundle that gives its probabilities; what can't be mapped is named, all of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from recspec.base.errors import BundleError, DataError
from recspec.bundle import folder as bundle
from recspec.cli import app as cli
from recspec.data.encoding.hashing import CROSS_KEY
from recspec.data.encoding.row_notes import MISSING_ID, UNKNOWN_ID
from recspec.evaluation import evaluate
from recspec.feature_spec import Chunk
from recspec.inference.predictor import Predictor
from recspec.tf_import.tf_columns import Columns
from recspec.tf_import.wide_deep import Imported, import_tf
from tests import made_up_tensorflow as tf

INPUTS = "dnn/input_from_feature_columns/input_layer"
LINEAR = "linear/linear_model"

NUMBERS = {"kind": "vocabulary", "dtype": "int64", "vocabulary": [5, 10], "num_oov_buckets": 5, "indicator": True}
CROSS = {"kind": "cross", "num_buckets": 1000, "wide": True}

COLUMNS: list[dict[str, object]] = [
    {"name": "n0", "kind": "numeric", "wide": True, "deep": True, "mean": 0.5, "std": 2.0},
    {"name": "age", "kind": "numeric", "deep": True},
    {"name": "age_bucketized", "kind": "bucketized", "key": "age", "boundaries": [10, 18, 30, 65]}
    | {"wide": True, "deep": True},
    {"name": "c_id", "kind": "identity", "num_buckets": 20, "default_value": 3, "wide": True, "embedding_dim": 3},
    {"name": "c_hash", "kind": "hash", "num_buckets": 30, "wide": True, "embedding_dim": 2},
    {"name": "c_vocab", "kind": "vocabulary", "vocabulary": ["red", "green"], "wide": True, "indicator": True},
    {"name": "c_num", **NUMBERS, "wide": True},
    {"name": "c_ihash", "kind": "hash", "dtype": "int64", "num_buckets": 40, "wide": True, "embedding_dim": 2},
    {"name": "age_bucketized_X_c_hash", **CROSS, "keys": ["age_bucketized", "c_hash"]},
    {"name": "c_ihash_X_c_vocab_X_hour", **CROSS, "keys": ["c_ihash", "c_vocab", "hour"]}
    | {"dtypes": {"hour": "int64"}, "embedding_dim": 3},
]

ROWS: list[dict[str, object]] = [
    {"n0": 0.5, "age": 18, "c_id": 7, "c_hash": "u1", "c_vocab": "red", "c_num": 10, "c_ihash": -3, "hour": 7},
    {"n0": -1.5, "age": 3, "c_id": 99, "c_hash": "u1", "c_vocab": "blue", "c_num": 11, "c_ihash": 4711, "hour": 0},
    {"n0": 2.0, "age": 65, "c_id": -1, "c_hash": "", "c_vocab": "", "c_num": -1, "c_ihash": -1, "hour": 23},
    {"n0": 0.0, "age": 9.5, **dict.fromkeys(("c_id", "c_hash", "c_vocab", "c_num", "c_ihash", "hour"))},
]

IDS: dict[str, list[int | None]] = {
    "age_bucketized": [2, 0, 4, 0],
    "c_id": [7, 3, None, None],
    "c_hash": [9, 9, None, None],
    "c_vocab": [0, None, None, None],
    "c_num": [1, 2 + 4, None, None],
    "c_ihash": [19, 21, None, None],
    "age_bucketized_X_c_hash": [506, 226, 346, None],
    "c_ihash_X_c_vocab_X_hour": [421, 995, 372, None],
}
"""What TensorFlow 2.15.1 makes of the rows; empty texts and -1 are dropped but from crosses, and null adds nothing."""

NUM_IDS = {
    "age_bucketized": 5,
    "c_id": 20,
    "c_hash": 30,
    "c_vocab": 2,
    "c_num": 7,
    "c_ihash": 40,
    "age_bucketized_X_c_hash": 1000,
    "c_ihash_X_c_vocab_X_hour": 1000,
}

ORDER = (
    "age",
    "age_bucketized",
    "c_hash_embedding",
    "c_id_embedding",
    "c_ihash_X_c_vocab_X_hour_embedding",
    "c_ihash_embedding",
    "c_num_indicator",
    "c_vocab_indicator",
    "n0",
)
"""The MLP's inputs as TensorFlow sorts them: `X` comes before `e`."""

WIDTHS = {"c_id": 3, "c_hash": 2, "c_ihash": 2, "c_ihash_X_c_vocab_X_hour": 3}
NUM_INPUTS = 1 + 5 + 2 + 3 + 3 + 2 + 7 + 2 + 1


def made_up_variables() -> dict[str, np.ndarray]:
    """A model with hidden layers of 4 and 3 units."""
    shapes: dict[str, tuple[int, ...]] = {f"{LINEAR}/{name}/weights": (size, 1) for name, size in NUM_IDS.items()}
    shapes |= {f"{LINEAR}/n0/weights": (1, 1), f"{LINEAR}/bias_weights": (1,)}
    shapes |= {f"{INPUTS}/{name}_embedding/embedding_weights": (NUM_IDS[name], width) for name, width in WIDTHS.items()}
    for layer, (inputs, units) in {"hiddenlayer_0": (NUM_INPUTS, 4), "hiddenlayer_1": (4, 3), "logits": (3, 1)}.items():
        shapes |= {f"dnn/{layer}/kernel": (inputs, units), f"dnn/{layer}/bias": (units,)}
    rng = np.random.default_rng(0)
    variables = {name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()}
    return variables | {
        "global_step": np.array(125, np.int64),
        "training/Adagrad/learning_rate": np.array(0.05, np.float32),
        "dnn/logits/kernel/Adagrad": np.ones((3, 1), np.float32),
        "dnn/beta1_power": np.array(0.9, np.float32),
    }


VARIABLES = made_up_variables()


def expected() -> np.ndarray:
    """The probabilities of the rows, forward in plain numpy from TensorFlow's ids."""

    def looked_up(table: np.ndarray, number: int | None) -> np.ndarray:
        return table[number] if number is not None else np.zeros(table.shape[1])

    probabilities = []
    for place, row in enumerate(ROWS):
        n0 = (float(str(row["n0"])) - 0.5) / 2
        logit = VARIABLES[f"{LINEAR}/bias_weights"][0] + n0 * VARIABLES[f"{LINEAR}/n0/weights"][0, 0]
        for name, ids in IDS.items():
            logit += looked_up(VARIABLES[f"{LINEAR}/{name}/weights"], ids[place])[0]
        parts: list[np.ndarray] = []
        for name in ORDER:
            base = name.removesuffix("_embedding").removesuffix("_indicator")
            if name in ("age", "n0"):
                parts.append(np.array([row["age"] if name == "age" else n0], np.float64))
            elif name.endswith("_embedding"):
                parts.append(looked_up(VARIABLES[f"{INPUTS}/{name}/embedding_weights"], IDS[base][place]))
            else:
                parts.append(looked_up(np.eye(NUM_IDS[base]), IDS[base][place]))
        x = np.concatenate(parts)
        for layer in ("hiddenlayer_0", "hiddenlayer_1"):
            x = np.maximum(x @ VARIABLES[f"dnn/{layer}/kernel"] + VARIABLES[f"dnn/{layer}/bias"], 0)
        logit += (x @ VARIABLES["dnn/logits/kernel"] + VARIABLES["dnn/logits/bias"])[0]
        probabilities.append(1 / (1 + np.exp(-logit)))
    return np.array(probabilities)


def described(folder: Path, columns: object = COLUMNS, **more: object) -> Path:
    path = folder / "columns.json"
    path.write_text(json.dumps({"columns": columns, **more}))
    return path


def imported(
    folder: Path, columns: object = COLUMNS, variables: Mapping[str, np.ndarray] = VARIABLES, **more: object
) -> Imported:
    model = tf.write_bundle(folder / "model.ckpt-125", variables)
    return import_tf(model, folder / "bundle", described(folder, columns, **more))


def refused(folder: Path, columns: object = COLUMNS, variables: Mapping[str, np.ndarray] = VARIABLES) -> list[str]:
    with pytest.raises(DataError) as caught:
        imported(folder, columns, variables)
    assert not (folder / "bundle").exists()
    return list(caught.value.problems)


def changed(name: str, **keys: object) -> list[dict[str, object]]:
    """The columns with one changed; a key that is None is left out."""
    found = [{**column, **keys} if column["name"] == name else column for column in COLUMNS]
    return [{key: value for key, value in column.items() if value is not None} for column in found]


# --- probabilities ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imported(tmp_path_factory.mktemp("made")).folder


def test_every_kind_of_column_gives_tensorflows_probabilities(made: Path) -> None:
    found, _ = Predictor.open(made, device="cpu").predict(pa.Table.from_pylist(ROWS))
    np.testing.assert_allclose(found, expected(), rtol=0, atol=1e-6)


def test_text_says_the_same_numbers(made: Path) -> None:
    rows = [{name: None if value is None else str(value) for name, value in row.items()} for row in ROWS]
    rows[1]["c_ihash"], rows[0]["c_id"] = "04711", "7.0"
    found, _ = Predictor.open(made, device="cpu").predict(pa.Table.from_pylist(rows))
    np.testing.assert_allclose(found, expected(), rtol=0, atol=1e-6)


def test_missing_values_are_counted(made: Path) -> None:
    _, seen = Predictor.open(made, device="cpu").predict(pa.Table.from_pylist(ROWS))
    assert seen.notes() == [
        "of 4 rows 2 have no c_id, c_vocab, c_num; 1 has an unknown c_vocab: they are scored with " + UNKNOWN_ID,
        "of 4 rows 2 have no c_hash, c_ihash: they are scored with " + MISSING_ID,
    ]


def test_variables_in_slices_make_the_same_bundle(made: Path, tmp_path: Path) -> None:
    cuts = {
        f"{INPUTS}/c_hash_embedding/embedding_weights": [((0, 10), (0, 2)), ((10, 20), (0, 2))],
        f"{LINEAR}/c_id/weights": [((0, 7), (0, 1)), ((7, 13), (0, 1))],
    }
    model = tf.write_bundle(tmp_path / "model", VARIABLES, cuts=cuts, shards=2)
    import_tf(model, tmp_path / "bundle", described(tmp_path))
    one, other = (bundle.load(path).model.state_dict() for path in (made, tmp_path / "bundle"))
    assert one.keys() == other.keys()
    assert all(bool((one[name] == other[name]).all()) for name in one)


def test_one_part_alone_is_a_model_too(tmp_path: Path) -> None:
    linear = {name: array for name, array in VARIABLES.items() if not name.startswith("dnn/")}
    wide = [
        {key: value for key, value in column.items() if key not in ("deep", "embedding_dim", "indicator")}
        for column in COLUMNS
        if column.get("wide")
    ]
    (tmp_path / "wide").mkdir()
    made = imported(tmp_path / "wide", wide, linear)
    assert made.summary["MLP"] == "none"
    trained = bundle.load(made.folder)
    assert not trained.card.settings["use_deep"]
    mlp = {name: array for name, array in VARIABLES.items() if not name.startswith("linear/")}
    deep = [{**column, "wide": False} for column in COLUMNS if column["name"] != "age_bucketized_X_c_hash"]
    (tmp_path / "deep").mkdir()
    trained = bundle.load(imported(tmp_path / "deep", deep, mlp).folder)
    assert not trained.card.settings["use_wide"]
    assert trained.card.trained == {"imported": "tensorflow", "checkpoint": "model.ckpt-125", "steps": 125}


def test_the_bundle_is_evaluated_on_rows_that_it_encoded(made: Path, tmp_path: Path) -> None:
    predictor = Predictor.open(made, device="cpu")
    assert predictor.encoders is not None
    columns = predictor.encoders.encode(pa.Table.from_pylist(ROWS))
    pq.write_table(pa.table({**columns, "label": np.array([1, 0, 1, 0], np.float32)}), tmp_path / "test.parquet")
    names = (*columns, "label")
    spec = predictor.spec.replace(
        sources={"test": (Chunk(type="parquet", features=names, files=("test.parquet",)),)}, folder=tmp_path
    )
    report = evaluate(predictor.bundle, spec, "test")
    wins = sum(a > b for a in expected()[[0, 2]] for b in expected()[[1, 3]]) / 4
    assert report.model.metrics["rows"]["auc"] == pytest.approx(wins)


def test_a_file_says_the_roles_the_label_and_where_a_vocabulary_lies(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("red\ngreen\n")
    (tmp_path / "numbers.txt").write_text("5\n10\n")
    files: dict[object, dict[str, object]] = {
        name: {"vocabulary": None, "vocabulary_file": f"{file}.txt"}
        for name, file in (("c_vocab", "words"), ("c_num", "numbers"))
    }
    files["c_hash"] = {"role": "user"}
    columns = [{**column, **files.get(column["name"], {})} for column in COLUMNS]
    columns = [{key: value for key, value in column.items() if value is not None} for column in columns]
    predictor = Predictor.open(imported(tmp_path, columns, label="clicked").folder, device="cpu")
    found, _ = predictor.predict(pa.Table.from_pylist(ROWS))
    np.testing.assert_allclose(found, expected(), rtol=0, atol=1e-6)
    assert (predictor.spec.label, predictor.spec.user_id) == ("clicked", "c_hash")


def test_values_beyond_a_vocabulary_may_take_one_id(tmp_path: Path) -> None:
    encoders = Columns.load(described(tmp_path, changed("c_vocab", default_value=1))).encoders()
    rows = pa.Table.from_pylist([{**ROWS[0], "c_vocab": "blue"}, {**ROWS[0], "c_vocab": "green"}])
    assert list(encoders.encode(rows, ["c_vocab"])["c_vocab"]) == [2, 2]


# --- what can't be mapped --------------------------------------------------------------------------------------------


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in VARIABLES.items() if name not in names}


def test_missing_variables_are_named_with_what_asks_for_them(tmp_path: Path) -> None:
    gone = (
        f"{LINEAR}/c_id/weights",
        f"{INPUTS}/c_hash_embedding/embedding_weights",
        "dnn/logits/bias",
        "dnn/hiddenlayer_1/bias",
    )
    assert refused(tmp_path, variables=without(*gone)) == [
        "variable 'dnn/hiddenlayer_1/bias' is missing, which the units of dnn/hiddenlayer_1 asks for",
        (
            f"variable '{INPUTS}/c_hash_embedding/embedding_weights' is missing, which column 'c_hash' (30 ids, "
            "embedding_dim 2) asks for"
        ),
        "variable 'dnn/logits/bias' is missing, which one logit asks for",
        f"variable '{LINEAR}/c_id/weights' is missing, which column 'c_id' (20 ids) in the linear part asks for",
    ]


def test_variables_that_no_column_asks_for_are_named_and_those_of_training_are_not(tmp_path: Path) -> None:
    more = {
        f"{LINEAR}/city/weights": np.zeros((9, 1), np.float32),
        f"{LINEAR}/city/weights/Ftrl": np.zeros((9, 1), np.float32),
        f"{LINEAR}/age/weights": np.zeros((1, 1), np.float32),
        f"{INPUTS}/c_hush_embedding/embedding_weights": np.zeros((9, 2), np.float32),
        f"{INPUTS}/a_b_shared_embedding/embedding_weights": np.zeros((9, 2), np.float32),
        "dnn/hiddenlayer_0/batchnorm_0/gamma": np.zeros(4, np.float32),
        "dnn/logit/kernel": np.zeros(1, np.float32),
    }
    assert refused(tmp_path, variables={**VARIABLES, **more}) == [
        "variable 'dnn/hiddenlayer_0/batchnorm_0/gamma' (4,): batch normalisation, which wide_deep does not have",
        (
            f"variable '{INPUTS}/a_b_shared_embedding/embedding_weights' (9, 2): an embedding that several columns "
            "share, which is not mapped"
        ),
        (
            f"variable '{INPUTS}/c_hush_embedding/embedding_weights' (9, 2): the columns file has no column 'c_hush' "
            "(did you mean 'c_hash'?)"
        ),
        (
            "variable 'dnn/logit/kernel' (1,): is none of a DNNLinearCombinedClassifier's "
            "(did you mean 'dnn/logits/kernel'?)"
        ),
        (
            f"variable '{LINEAR}/age/weights' (1, 1): column 'age' of the columns file does not ask for it; give it "
            '"wide": true'
        ),
        f"variable '{LINEAR}/city/weights' (9, 1): the columns file has no column 'city'",
    ]


def test_other_shapes_and_types_are_named(tmp_path: Path) -> None:
    columns = changed("c_id", num_buckets=21, embedding_dim=4)
    other = {**VARIABLES, "dnn/logits/bias": np.zeros(1, np.int32), "dnn/logits/kernel": np.zeros((3, 2), np.float32)}
    inputs = (
        "age 1 + age_bucketized 5 + c_hash_embedding 2 + c_id_embedding 4 + c_ihash_X_c_vocab_X_hour_embedding 3 "
        "+ c_ihash_embedding 2 + c_num_indicator 7 + c_vocab_indicator 2 + n0 1 = 27"
    )
    assert refused(tmp_path, columns, other) == [
        f"variable 'dnn/hiddenlayer_0/kernel' has shape (26, 4); the MLP's input ({inputs}) asks for (27, 4)",
        (
            f"variable '{INPUTS}/c_id_embedding/embedding_weights' has shape (20, 3); column 'c_id' (21 ids, "
            "embedding_dim 4) asks for (21, 4)"
        ),
        "variable 'dnn/logits/bias' holds int32; expected floats",
        "variable 'dnn/logits/kernel' has shape (3, 2); the units of dnn/hiddenlayer_1, and one logit asks for (3, 1)",
        (
            f"variable '{LINEAR}/c_id/weights' has shape (20, 1); column 'c_id' (21 ids) in the linear part asks for "
            "(21, 1)"
        ),
    ]


def test_parts_that_the_columns_leave_out_are_named(tmp_path: Path) -> None:
    narrow = [{**column, "wide": False} for column in COLUMNS if column["name"] != "age_bucketized_X_c_hash"]
    problems = refused(tmp_path, narrow)
    assert f"variable '{LINEAR}/bias_weights' (1,): the columns file has no column with \"wide\": true" in problems
    wide = [{"name": "n0", "kind": "numeric", "wide": True}]
    problems = refused(tmp_path, wide)
    assert "variable 'dnn/logits/kernel' (3, 1): the columns file has no column that the MLP reads" in problems
    assert (
        f"variable '{INPUTS}/c_id_embedding/embedding_weights' (20, 3): the columns file has no column 'c_id'"
        in problems
    )


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    broken = {**VARIABLES, "dnn/logits/bias": np.array([np.nan], np.float32)}
    assert "variable 'dnn/logits/bias' holds numbers that are not finite" in refused(tmp_path, variables=broken)[0]


def test_a_one_hot_column_that_is_too_wide_is_named(tmp_path: Path) -> None:
    columns = changed("c_vocab", kind="hash", vocabulary=None, num_buckets=10_000)
    assert "column 'c_vocab' enters the MLP one-hot with 10,000 ids; wide_deep takes fewer than 10,000" in refused(
        tmp_path, columns
    )


def relu(layer: int, kind: str = "Relu") -> tuple[str, str, tuple[str, ...], dict[str, int]]:
    return (f"dnn/hiddenlayer_{layer}/{kind}", kind, (f"dnn/hiddenlayer_{layer}/BiasAdd",), {})


def refused_graph(folder: Path, *nodes: tuple[str, str, tuple[str, ...], dict[str, int]]) -> list[str]:
    (folder / "model.ckpt-125.meta").write_bytes(tf.graph(*nodes))
    columns = [{k: v for k, v in column.items() if k not in ("mean", "std")} for column in COLUMNS]
    return refused(folder, columns)


def test_what_the_graph_alone_shows_is_named(tmp_path: Path) -> None:
    cross = "linear/linear_model/linear/linear_model/linear/linear_model/age_bucketized_X_c_hash/SparseCross"
    assert refused_graph(
        tmp_path,
        relu(0, "Tanh"),
        relu(1),
        (f"{INPUTS}/n0_1/ExpandDims", "ExpandDims", ("n0",), {}),
        (f"{INPUTS}/n0_1/truediv", "RealDiv", ("n0",), {}),
        (f"{INPUTS}/age_1/Reshape", "Reshape", ("age",), {}),
        (cross, "SparseCross", (), {"hash_key": 7, "num_buckets": 1000}),
        ("training/gradients/dnn/hiddenlayer_1/Relu_grad", "ReluGrad", ("dnn/hiddenlayer_1/BiasAdd",), {}),
    ) == [
        "column 'age_bucketized_X_c_hash' has the hash_key 7, which is not mapped",
        (
            "column 'n0' has a normalizer_fn (RealDiv); if it is (x - mean) / std, give the column "
            '"mean" and "std"; if another, apply it to the rows and give "std": 1'
        ),
        "hidden layer 0 goes on with Tanh; wide_deep has relu alone",
    ]


def test_a_graph_of_relu_is_taken_and_one_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert imported(tmp_path).notes == (
        "model.ckpt-125.meta is not there, so the activation can't be seen: relu is taken, the default",
    )
    (tmp_path / "model.ckpt-125.meta").write_bytes(tf.graph(relu(0), relu(1)))
    again = import_tf(tmp_path / "model.ckpt-125", tmp_path / "bundle", tmp_path / "columns.json", force=True)
    assert again.notes == ()


# --- the columns file ------------------------------------------------------------------------------------------------

KINDS = "'numeric', 'identity', 'hash', 'vocabulary', 'bucketized', 'cross'"
NUMERIC = {"name": "n", "kind": "numeric", "wide": True}
HASH = {"name": "c", "kind": "hash", "num_buckets": 9, "wide": True}
WORDS = {"name": "v", "kind": "vocabulary", "vocabulary": ["a"], "wide": True}
BUCKETS = {"name": "b", "kind": "bucketized", "key": "n", "boundaries": [2], "wide": True}
CROSSED = {"name": "x", "kind": "cross", "keys": ["a", "b"], "num_buckets": 9, "wide": True}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (["x"], "columns[0] is 'x'; expected an object with name and kind"),
        ([{**HASH, "kind": None}], "columns[0] 'c': has no kind; one of " + KINDS),
        (
            [{**HASH, "kind": "hashed"}],
            f"columns[0] 'c': unknown kind 'hashed' (did you mean 'hash'?); known: {KINDS}",
        ),
        (
            [{**HASH, "num_bucket": 3}],
            (
                "columns[0] 'c': unknown key 'num_bucket' (did you mean 'num_buckets'?); known: "
                "'name', 'wide', 'role', 'embedding_dim', 'indicator', 'combiner', 'kind', 'dtype', 'num_buckets'"
            ),
        ),
        ([{"name": "c", "kind": "hash", "wide": True}], "columns[0] 'c': has no num_buckets"),
        ([{**HASH, "num_buckets": 0}], "columns[0] 'c'.num_buckets is '0': Input should be greater than 0"),
        (
            [{**HASH, "embedding_dim": 2, "indicator": True}],
            "columns[0] 'c': has an embedding_dim and an indicator; the MLP takes one of them",
        ),
        (
            [{**HASH, "wide": False}],
            'column \'c\' is read by neither part; give it "wide": true, or an "embedding_dim" or "indicator": true',
        ),
        ([HASH, HASH], "column 'c' stands more than once; expected once"),
        ([{**HASH, "name": "label"}], "the label is called 'label', as a column is; name another one with \"label\""),
        (
            [{**HASH, "kind": "identity", "default_value": 9}],
            "columns[0] 'c': default_value is 9; expected one below num_buckets",
        ),
        (
            [{**WORDS, "vocabulary": ["a", 1]}],
            "columns[0] 'v'.vocabulary: expected texts, or whole numbers, at least one",
        ),
        ([{**WORDS, "vocabulary": ["a", "a"]}], "columns[0] 'v': vocabulary holds 'a' more than once"),
        ([{**WORDS, "dtype": "int64"}], "columns[0] 'v': dtype is int64, but the vocabulary holds texts"),
        (
            [{**WORDS, "num_oov_buckets": 1, "default_value": 0}],
            "columns[0] 'v': has num_oov_buckets and a default_value; TensorFlow takes one of them",
        ),
        ([{**WORDS, "default_value": 1}], "columns[0] 'v': default_value is 1; expected one below 1"),
        (
            [{**WORDS, "vocabulary_file": "x"}],
            "columns[0] 'v': has a vocabulary and a vocabulary_file; expected one of them",
        ),
        ([{**BUCKETS, "boundaries": [2, 1]}], "columns[0] 'b': boundaries must rise"),
        (
            [{**BUCKETS, "deep": True, "indicator": True}],
            "columns[0] 'b': has deep beside an indicator or an embedding_dim; the MLP takes one of them",
        ),
        ([{**CROSSED, "keys": ["a", "a"]}], "columns[0] 'x': keys holds a name more than once"),
        ([{**CROSSED, "dtypes": {"c": "int64"}}], "columns[0] 'x': dtypes: unknown key 'c'; known: 'a', 'b'"),
        (
            [{**CROSSED, "hash_key": 7}],
            f"columns[0] 'x': hash_key is 7; only TensorFlow's default, {CROSS_KEY}, is mapped",
        ),
        (
            [HASH, {**CROSSED, "keys": ["a", "c"], "dtypes": {"c": "int64"}}],
            "column 'x': dtypes names 'c', whose own column says it",
        ),
        (
            [NUMERIC, {**CROSSED, "keys": ["a", "n"]}],
            "column 'x': the key 'n' is a numeric column; name its bucketized column instead",
        ),
        (
            [BUCKETS, {**CROSSED, "keys": ["b", "n"]}],
            "column 'x': two keys are made from one raw column, which is not mapped",
        ),
        (
            [{**NUMERIC, "role": "user"}],
            "the role 'user' has no identity, hash, vocabulary or bucketized column; expected its id",
        ),
    ],
)
def test_what_is_wrong_with_a_column_is_said(columns: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Columns.load(described(tmp_path, columns))
    assert caught.value.problems == (problem,)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = described(
        tmp_path, [{**HASH, "num_buckets": 0, "colour": 1}, {**HASH, "name": "d", "kind": "hush"}], lable="y"
    )
    with pytest.raises(DataError) as caught:
        Columns.load(path)
    assert len(caught.value.problems) == 4
    assert "unknown key 'lable' (did you mean 'label'?); known: 'columns', 'label'" in caught.value.problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged: "),
        ("[" * 100_000, "damaged: "),
        ('{"columns": []}', 'expected an object with a list "columns", one object a feature column'),
        (
            '{"columns": [{"name": "c", "kind": "hash", "num_buckets": 9, "wide": true}], "label": 3}',
            "label is 3; expected a name",
        ),
    ],
)
def test_a_file_that_is_none_of_columns_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "columns.json").write_text(text)
    with pytest.raises(DataError, match=r"columns\.json: ") as caught:
        Columns.load(tmp_path / "columns.json")
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    described(tmp_path)
    with pytest.raises(DataError, match=r"columns.jsn: can't be read: no such file \(did you mean 'columns.json'\?\)"):
        Columns.load(tmp_path / "columns.jsn")
    with pytest.raises(DataError, match=r"columns\[0\] 'v'.vocabulary_file: .*words: can't be read as text"):
        Columns.load(
            described(tmp_path, [{"name": "v", "kind": "vocabulary", "vocabulary_file": "words", "wide": True}])
        )


@pytest.mark.parametrize("file", ["/dev/zero", "../words", "link", "pipe"])
def test_a_vocabulary_lies_in_the_folder_of_its_columns(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "columns"
    folder.mkdir()
    (tmp_path / "words").write_text("red\n")
    (folder / "link").symlink_to(tmp_path / "words")
    os.mkfifo(folder / "pipe")
    columns = [{"name": "v", "kind": "vocabulary", "vocabulary_file": file, "wide": True}]
    problem = "is a named pipe" if file == "pipe" else "leads outside the folder"
    with pytest.raises(DataError, match=rf"columns\[0\] 'v'.vocabulary_file: '{file}' {problem}"):
        Columns.load(described(folder, columns))


# --- where it is written ---------------------------------------------------------------------------------------------


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    imported(tmp_path)
    with pytest.raises(
        BundleError, match=r"a bundle is there already; name another folder, or replace it with --force"
    ):
        imported(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(
            BundleError, match=r"mine: is there already, and is no bundle; name a folder that does not exist"
        ):
            import_tf(tmp_path / "model.ckpt-125", tmp_path / "mine", tmp_path / "columns.json", force=force)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"


# --- the command, and TensorFlow's own model -------------------------------------------------------------------------


def recspec(*arguments: object) -> None:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def golden_rows(folder: Path, file: Path) -> np.ndarray:
    """Writes the raw rows as they were given to TensorFlow, and gives its probabilities."""
    golden = np.load(folder / "golden.npz")
    columns = {f"n{place}": golden["n"][:, place] for place in range(3)}
    columns |= {name: pa.array(golden[name]) for name in ("c_id", "c_hash", "c_vocab", "c_ihash")}
    if file.suffix == ".csv":
        pa_csv.write_csv(pa.table(columns), file)
    else:
        pq.write_table(pa.table(columns), file)
    return np.asarray(golden["prob"])


@pytest.mark.parametrize(("form", "ending"), [("checkpoint", "csv"), ("saved_model", "parquet")])
def test_the_golden_rows_get_tensorflows_probabilities(
    form: str, ending: str, real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = real_data("tf-wide-deep")
    theirs = golden_rows(folder, tmp_path / f"rows.{ending}")
    made = tmp_path / "bundle"
    recspec("import-tf", folder / form, made, "--columns", folder / "columns.json")
    recspec("predict", made, tmp_path / f"rows.{ending}", "--out", tmp_path / "scored.parquet", "--device", "cpu")
    ours = pq.read_table(tmp_path / "scored.parquet")["probability"].to_numpy()
    assert len(ours) == 2000
    assert np.abs(ours - theirs).max() < 1e-6


def test_the_golden_ids_are_tensorflows_plus_one(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    folder = real_data("tf-wide-deep")
    golden_rows(folder, tmp_path / "rows.parquet")
    golden = np.load(folder / "golden.npz")
    encoded = Columns.load(folder / "columns.json").encoders().encode(pq.read_table(tmp_path / "rows.parquet"))
    for name, theirs in {
        "c_id": "ids_c_id",
        "c_hash": "ids_c_hash",
        "c_vocab": "ids_c_vocab",
        "c_ihash": "ids_c_ihash",
        "c_hash_X_c_vocab": "ids_cross",
    }.items():
        np.testing.assert_array_equal(encoded[name], golden[theirs] + 1, err_msg=name)
