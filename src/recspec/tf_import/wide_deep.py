"""Turns a Wide & Deep model that TensorFlow trained into a bundle, without TensorFlow.

Reads the variables of a `DNNLinearCombinedClassifier`, or of its parts `DNNClassifier` and `LinearClassifier`, from a
checkpoint or a SavedModel, and the feature columns from a file that describes them. One error names everything that
can't be mapped. Optimizers' variables are ignored.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from recspec.base.errors import BundleError, DataError, nearest
from recspec.base.files import local, locked
from recspec.bundle import Card
from recspec.bundle import folder as bundle
from recspec.data.encoding import CROSS_KEY, ENCODERS_FILE, VOCABULARIES
from recspec.feature_spec import Feature, FeatureSpec
from recspec.models import INDICATOR_MOST_IDS, Deep, Wide, WideDeep, WideDeepSettings, on_meta_device
from recspec.models.layers import Embeddings
from recspec.tf_import import tensorbundle
from recspec.tf_import.tensorbundle import Operation, Saved, TensorBundle
from recspec.tf_import.tf_columns import (
    Column,
    Columns,
    Cross,
    Numeric,
    deep_name,
    deep_width,
    embedding_dim,
    num_weights,
)

LINEAR = "linear/linear_model"
INPUTS = "dnn/input_from_feature_columns/input_layer"
BIAS = f"{LINEAR}/bias_weights"

PASSED_OVER = re.compile(
    r"training/|(.*/)?beta[12]_power$|global_step$|save_counter|_CHECKPOINTABLE_OBJECT_GRAPH$|signal_early_stopping/"
)
"""Variables of training alone; also those whose name begins with another variable's, as `kernel/Adagrad` does."""

MOVES = frozenset(
    """
Const ExpandDims Squeeze Shape StridedSlice Pack Reshape Cast Identity MatMul VarHandleOp VariableV2 ReadVariableOp
""".split()
)
"""Operations of a numeric column that leave its numbers as they are."""


@dataclass(frozen=True)
class Imported:
    """The bundle, and notes on what the files do not state."""

    folder: Path
    summary: Mapping[str, object]
    notes: tuple[str, ...]


def import_tf(model: Path, out: Path, columns: Path, *, force: bool = False) -> Imported:
    """Make a bundle of a TensorFlow model.

    Args:
        model: A SavedModel's folder, a folder of checkpoints, whose latest is read, or a checkpoint's prefix.
        out: The bundle's folder; `force` replaces an existing bundle.
        columns: The JSON file that describes the feature columns.

    Raises:
        DataError: if a file is damaged, or with every variable and column that can't be mapped.
        BundleError: if `out` is taken, or can't be written.
    """
    out = local(out, "OUT")
    with locked(out, "importing into"):
        _check_free(out, force=force)
        return _import(local(model, "MODEL"), out, local(columns, "--columns"))


def _import(model: Path, out: Path, columns: Path) -> Imported:
    saved = tensorbundle.find(model)
    described = Columns.load(columns)
    variables = TensorBundle.open(saved.prefix)
    expected = _expected(described, variables)
    hidden = [shape[0] for name, (shape, _) in expected.items() if re.fullmatch(r"dnn/hiddenlayer_\d+/bias", name)]
    problems = [*_problems(described, expected, variables), *_problems_of_graph(described, saved, len(hidden))]
    DataError.refuse(f"{model} with the columns of {columns}", problems)
    values = {name: _numbers(variables, name) for name in expected}
    with tempfile.TemporaryDirectory() as sides:
        spec = _specification(described, Path(sides))
        settings = _settings(described, hidden)
        net = on_meta_device(lambda: WideDeep(spec, settings))
        weights = {name: torch.zeros(tensor.shape) for name, tensor in net.state_dict().items()}
        if described.wide:
            _fill_wide(net.wide, described, values, weights)
        if described.deep:
            _fill_deep(net.deep, described, values, weights)
        trained: dict[str, object] = {"imported": "tensorflow", "checkpoint": saved.prefix.name}
        if steps := _steps(variables):
            trained["steps"] = steps
        card = Card(model=WideDeep.name, settings=settings.model_dump(mode="json"), trained=trained)
        bundle.save(out, net, card, weights=weights)
    summary = {
        "columns": len(described.read),
        "linear part": len(described.wide),
        "MLP": f"{len(described.deep)} columns, hidden {hidden}" if described.deep else "none",
        "variables": len(expected),
        "numbers": sum(tensor.numel() for tensor in values.values()),
        "variables of training passed over": len(variables.entries) - len(expected),
    }
    no_graph = f"{saved.prefix.name}.meta is not there, so the activation can't be seen: relu is taken, the default"
    return Imported(out, summary, (no_graph,) if described.deep and saved.graph is None else ())


def _check_free(out: Path, *, force: bool) -> None:
    is_bundle = (out / "bundle.json").is_file()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())) or (force and is_bundle):
        return
    if is_bundle:
        raise BundleError(f"{out}: a bundle is there already; name another folder, or replace it with --force")
    raise BundleError(f"{out}: is there already, and is no bundle; name a folder that does not exist")


# --- expected variables ----------------------------------------------------------------------------------------------


Expected: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]
"""The shape of each expected variable, and the reason for it in words."""


def _expected(columns: Columns, variables: TensorBundle) -> Expected:
    expected: dict[str, tuple[tuple[int, ...], str]] = {}
    for column in columns.wide:
        reason = f"column '{column.name}' ({_size(column)}) in the linear part"
        expected[_wide_name(column)] = (num_weights(column), 1), reason
    if columns.wide:
        expected[BIAS] = (1,), "the linear part"
    if not columns.deep:
        return expected
    for column in columns.deep:
        if (width := embedding_dim(column)) is not None:
            reason = f"column '{column.name}' ({_size(column)}, embedding_dim {width})"
            expected[_deep_name(column)] = (num_weights(column), width), reason
    width = sum(deep_width(column) for column in columns.deep)
    reason = " + ".join(f"{deep_name(column)} {deep_width(column)}" for column in columns.deep)
    reason = f"the MLP's input ({reason} = {width})"
    for number in count():
        layer = f"dnn/hiddenlayer_{number}"
        found = variables.entries.get(f"{layer}/kernel")
        if number and found is None:
            break
        units = found.shape[1] if found is not None and len(found.shape) == 2 else 0
        expected[f"{layer}/kernel"] = (width, units), reason
        expected[f"{layer}/bias"] = (units,), f"the units of {layer}"
        width, reason = units, f"the units of {layer}"
    expected["dnn/logits/kernel"] = (width, 1), f"{reason}, and one logit"
    expected["dnn/logits/bias"] = (1,), "one logit"
    return expected


def _problems(columns: Columns, expected: Expected, variables: TensorBundle) -> Iterator[str]:
    """Missing variables, those of another shape or type, and those that no column explains."""
    found = variables.entries
    strange = [name for name in found if name not in expected and not _is_of_training(name, found)]
    for name, (shape, why) in expected.items():
        if name not in found:
            yield f"variable '{name}' is missing, which {why} asks for{nearest(name, strange)}"
        elif found[name].shape != shape:
            yield f"variable '{name}' has shape {found[name].shape}; {why} asks for {shape}"
        elif not found[name].type.endswith("float16") and not found[name].type.startswith("float"):
            yield f"variable '{name}' holds {found[name].type}; expected floats"
    yield from (f"variable '{name}' {found[name].shape}: {_unasked(columns, expected, name)}" for name in strange)
    for column in columns.deep:
        if embedding_dim(column) is None and num_weights(column) >= INDICATOR_MOST_IDS:
            yield (
                f"column '{column.name}' enters the MLP one-hot with {num_weights(column):,} ids; wide_deep takes "
                f"fewer than {INDICATOR_MOST_IDS:,}"
            )


def _unasked(columns: Columns, expected: Expected, name: str) -> str:
    """The reason why a variable was not mapped, and a remedy."""
    if re.search(r"batch_?norm", name):
        return "batch normalisation, which wide_deep does not have"
    if "shared_embedding" in name:
        return "an embedding that several columns share, which is not mapped"
    known = {column.name: column for column in columns.columns}
    wide = re.fullmatch(rf"{LINEAR}/(.+)/weights", name)
    deep = re.fullmatch(rf"{INPUTS}/(.+)_embedding/embedding_weights", name)
    if found := wide or deep:
        key = '"wide": true' if wide else 'an "embedding_dim"'
        if found[1] in known:
            return f"column '{found[1]}' of the columns file does not ask for it; give it {key}"
        return f"the columns file has no column '{found[1]}'{nearest(found[1], known)}"
    if name == BIAS:
        return 'the columns file has no column with "wide": true'
    if re.fullmatch(r"dnn/(hiddenlayer_\d+|logits)/(kernel|bias)", name) and not columns.deep:
        return "the columns file has no column that the MLP reads"
    return f"is none of a DNNLinearCombinedClassifier's{nearest(name, expected)}"


def _is_of_training(name: str, known: Iterable[str]) -> bool:
    owners = {name[:place] for place, letter in enumerate(name) if letter == "/"}
    return PASSED_OVER.match(name) is not None or any(other in owners for other in known)


def _wide_name(column: Column) -> str:
    return f"{LINEAR}/{column.name}/weights"


def _deep_name(column: Column) -> str:
    return f"{INPUTS}/{column.name}_embedding/embedding_weights"


def _size(column: Column) -> str:
    return "one number" if isinstance(column, Numeric) else f"{num_weights(column):,} ids"


# --- the graph -------------------------------------------------------------------------------------------------------


def _problems_of_graph(columns: Columns, saved: Saved, num_layers: int) -> Iterator[str]:
    """Problems that no variable shows: an activation other than relu, a normalizer_fn, the key of a cross."""
    if saved.graph is None:
        return
    operations = [own for own in tensorbundle.operations(saved.graph) if not own.name.startswith(("training/", "save"))]
    for layer in range(num_layers):
        kinds = {own.type for own in operations if f"dnn/hiddenlayer_{layer}/BiasAdd" in own.inputs}
        if kinds and "Relu" not in kinds:
            yield f"hidden layer {layer} goes on with {' and '.join(sorted(kinds))}; wide_deep has relu alone"
    for column in columns.read:
        own = _operations_of(column, operations, {each.name for each in columns.columns})
        kinds = {each.type for each in own} - MOVES
        if isinstance(column, Numeric) and not column.is_normalized and kinds:
            yield (
                f"column '{column.name}' has a normalizer_fn ({', '.join(sorted(kinds))}); if it is (x - mean) / std, "
                'give the column "mean" and "std"; if another, apply it to the rows and give "std": 1'
            )
        if isinstance(column, Cross):
            keys = {each.numbers["hash_key"] for each in own if "hash_key" in each.numbers} - {CROSS_KEY}
            yield from (f"column '{column.name}' has the hash_key {key}, which is not mapped" for key in sorted(keys))


def _operations_of(column: Column, operations: Iterable[Operation], names: set[str]) -> list[Operation]:
    """The operations in a column's scope, to whose name TensorFlow may have added a number."""
    scope = re.compile(rf"(?:.*/)?(?:input_layer|linear_model)/({re.escape(column.name)}(?:_\d+)?)/[^/]+$")
    others = names - {column.name}
    return [own for own in operations if (found := scope.match(own.name)) is not None and found[1] not in others]


# --- the bundle ------------------------------------------------------------------------------------------------------


def _specification(columns: Columns, folder: Path) -> FeatureSpec:
    """The specification, with its encoders in `folder`."""
    columns.encoders().save(folder)
    roles: dict[str, tuple[str, ...]] = {}
    for column in columns.read:
        roles[column.role] = (*roles.get(column.role, ()), column.name)
    features = {**columns.features(), columns.label: Feature(dtype="float32")}
    metadata = {"dataset": "tensorflow", "encoders": ENCODERS_FILE, "vocabularies": VOCABULARIES}
    return FeatureSpec(features, channels={**roles, "label": (columns.label,)}, metadata=metadata, folder=folder)


def _settings(columns: Columns, hidden: Sequence[int]) -> WideDeepSettings:
    widths = {column.name: embedding_dim(column) for column in columns.deep}
    given: dict[str, object] = {
        "dropout": 0.0,
        "combiner": "mean",
        "use_wide": bool(columns.wide),
        "use_deep": bool(columns.deep),
        "embedding_dims": {name: width for name, width in widths.items() if width is not None},
        "indicators": [c.name for c in columns.deep if widths[c.name] is None and not isinstance(c, Numeric)],
        "wide_features": [column.name for column in columns.wide],
        "deep_features": [column.name for column in columns.deep],
    }
    return WideDeepSettings.model_validate(given | ({"hidden": hidden} if hidden else {}))


def _fill_wide(wide: Wide, columns: Columns, values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for column in columns.wide:
        own = values[_wide_name(column)]
        if column.name in wide.ids:
            _fill_table(wide.tables, "wide.tables", column.name, own, weights)
        else:
            weights["wide.slopes"][wide.numbers.index(column.name)] = own[0, 0]
    weights["wide.bias"].copy_(values[BIAS])


def _fill_deep(deep: Deep, columns: Columns, values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Kernels (in, out) become weights (out, in); the rows of the first one move to recspec's order of features."""
    rows: dict[str, slice] = {}
    end = 0
    for column in columns.deep:
        rows[column.name] = slice(end, end + deep_width(column))
        end += deep_width(column)
        if embedding_dim(column) is not None:
            _fill_table(deep.embeddings, "deep.embeddings", column.name, values[_deep_name(column)], weights)
    for layer in range(len(deep.mlp.layers)):
        kernel = values[f"dnn/hiddenlayer_{layer}/kernel"].T
        if layer:
            weights[f"deep.mlp.layers.{layer}.weight"].copy_(kernel)
        else:
            at = 0
            embedded = deep.embeddings.order() if hasattr(deep, "embeddings") else ()
            for name in (*embedded, *deep.indicators, *deep.numbers):
                at += name in deep.indicators  # the column of id 0, a missing value, for which TensorFlow adds nothing
                width = rows[name].stop - rows[name].start
                weights["deep.mlp.layers.0.weight"][:, at : at + width] = kernel[:, rows[name]]
                at += width
        weights[f"deep.mlp.layers.{layer}.bias"].copy_(values[f"dnn/hiddenlayer_{layer}/bias"])
    weights["deep.out.weight"].copy_(values["dnn/logits/kernel"].T)
    weights["deep.out.bias"].copy_(values["dnn/logits/bias"])


def _fill_table(tables: Embeddings, module: str, feature: str, own: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Fill a feature's rows from id 1; the row of id 0, a missing value, stays 0."""
    first = tables.first_row[feature] + 1
    weights[f"{module}.stores.{tables.widths[feature]}"][first : first + len(own)] = own


def _numbers(variables: TensorBundle, name: str) -> Tensor:
    tensor = torch.from_numpy(np.array(variables.read(name), np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{variables.prefix}: variable '{name}' holds numbers that are not finite")
    return tensor


def _steps(variables: TensorBundle) -> int | None:
    """The number of training steps, if the checkpoint has it."""
    found = variables.entries.get("global_step")
    if found is None or found.shape or not found.type.startswith("int"):
        return None
    return int(variables.read("global_step").astype(np.int64))
