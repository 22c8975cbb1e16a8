"""A Wide & Deep model that TensorFlow trained becomes a bundle, without TensorFlow.

Takes the variables of a `DNNLinearCombinedClassifier` (or of a `DNNClassifier` or `LinearClassifier`, which are one of
its parts) from a checkpoint or a SavedModel, and the feature columns from a file that describes them. What can't be
mapped is named, all at once; optimizers' variables are passed over.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recspec.bundle import Card
from recspec.bundle import folder as bundle
from recspec.encoding import CROSS_KEY, ENCODERS_FILE, VOCABULARIES
from recspec.errors import BundleError, DataError, nearest
from recspec.files import local, locked
from recspec.models import INDICATOR_MOST_IDS, Deep, Wide, WideDeep, WideDeepSettings
from recspec.nn import Embeddings, without_memory
from recspec.spec import Feature, FeatureSpec
from recspec.tf_import import tensorbundle
from recspec.tf_import.tensorbundle import Array, Operation, Saved, TensorBundle
from recspec.tf_import.tf_columns import Column, Columns, Cross, Numeric

LINEAR = "linear/linear_model"
INPUTS = "dnn/input_from_feature_columns/input_layer"
BIAS = f"{LINEAR}/bias_weights"

PASSED_OVER = re.compile(
    r"training/|(.*/)?beta[12]_power$|global_step$|save_counter|_CHECKPOINTABLE_OBJECT_GRAPH$|signal_early_stopping/"
)
"""Variables of training alone; also those whose name begins with another variable's, as `kernel/Adagrad` does."""

MOVES = frozenset(
    {
        "Const", "ExpandDims", "Squeeze", "Shape", "StridedSlice", "Pack", "Reshape", "Cast", "Identity", "MatMul",
        "VarHandleOp", "VariableV2", "ReadVariableOp",
    }
)  # fmt: skip
"""Operations of a numeric column that leave its numbers as they are."""


@dataclass(frozen=True)
class Imported:
    """What was made, and what the files could not say."""

    folder: Path
    summary: Mapping[str, object]
    notes: tuple[str, ...]


def import_tf(model: Path, out: Path, columns: Path, *, force: bool = False) -> Imported:
    """Make a bundle of a TensorFlow model.

    Args:
        model: A SavedModel's folder, a folder of checkpoints (its latest is taken), or a checkpoint's prefix.
        out: The bundle's folder; with `force` a bundle that is there is replaced.
        columns: The JSON file that describes the feature columns.

    Raises:
        DataError: naming every variable and every column that can't be mapped, or the file that is damaged.
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
    expected = _Expected.of(described, variables)
    problems = [*expected.problems(variables), *_problems_of_graph(described, saved, expected.hidden)]
    if problems:
        raise DataError.of(f"{model} with the columns of {columns}", problems)
    values = {name: _numbers(variables, name) for name in expected.shapes}
    with tempfile.TemporaryDirectory() as sides:
        spec = _specification(described, Path(sides))
        settings = _settings(described, expected.hidden)
        net = without_memory(lambda: WideDeep(spec, settings))
        weights = {name: torch.zeros(tensor.shape) for name, tensor in net.state_dict().items()}
        if described.wide:
            _fill_wide(net.wide, described, values, weights)
        if described.deep:
            _fill_deep(net.deep, described, values, weights)
        steps = _steps(variables)
        card = Card(
            model=WideDeep.name,
            settings=settings.model_dump(mode="json"),
            trained={"imported": "tensorflow", "checkpoint": saved.prefix.name} | ({"steps": steps} if steps else {}),
        )
        bundle.save(out, net, card, weights=weights)
    summary = {
        "columns": len(described.read),
        "linear part": len(described.wide),
        "MLP": f"{len(described.deep)} columns, hidden {list(expected.hidden)}" if described.deep else "none",
        "variables": len(expected.shapes),
        "numbers": sum(tensor.numel() for tensor in values.values()),
        "variables of training passed over": len(variables.entries) - len(expected.shapes),
    }
    return Imported(out, summary, tuple(_notes(described, saved)))


def _check_free(out: Path, *, force: bool) -> None:
    is_bundle = (out / "bundle.json").is_file()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())) or (force and is_bundle):
        return
    if is_bundle:
        raise BundleError(f"{out}: a bundle is there already; name another folder, or replace it with --force")
    raise BundleError(f"{out}: is there already, and is no bundle; name a folder that does not exist")


def _notes(columns: Columns, saved: Saved) -> Iterator[str]:
    if columns.deep and saved.graph is None:
        yield f"{saved.prefix.name}.meta is not there, so the activation can't be seen: relu is taken, the default"


# --- which variables there must be -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Expected:
    """The variables that the columns ask for."""

    columns: Columns
    hidden: tuple[int, ...]
    """Widths of the hidden layers, as the variables have them."""
    shapes: Mapping[str, tuple[int, ...]]
    why: Mapping[str, str]
    """What asks for a variable, in words."""

    @classmethod
    def of(cls, columns: Columns, variables: TensorBundle) -> _Expected:
        shapes: dict[str, tuple[int, ...]] = {}
        why: dict[str, str] = {}
        hidden: list[int] = []

        def expect(name: str, shape: tuple[int, ...], reason: str) -> None:
            shapes[name], why[name] = shape, reason

        for column in columns.wide:
            reason = f"column '{column.name}' ({_size(column)}) in the linear part"
            expect(_wide_name(column), (column.num_weights, 1), reason)
        if columns.wide:
            expect(BIAS, (1,), "the linear part")
        if columns.deep:
            for column in columns.deep:
                if (width := _embedding_dim(column)) is not None:
                    reason = f"column '{column.name}' ({_size(column)}, embedding_dim {width})"
                    expect(_deep_name(column), (column.num_weights, width), reason)
            width = sum(column.deep_width for column in columns.deep)
            reason = " + ".join(f"{column.deep_name} {column.deep_width}" for column in columns.deep)
            reason = f"the MLP's input ({reason} = {width})"
            while not hidden or f"dnn/hiddenlayer_{len(hidden)}/kernel" in variables.entries:
                layer = f"dnn/hiddenlayer_{len(hidden)}"
                found = variables.entries.get(f"{layer}/kernel")
                units = found.shape[1] if found is not None and len(found.shape) == 2 else 0
                expect(f"{layer}/kernel", (width, units), reason)
                expect(f"{layer}/bias", (units,), f"the units of {layer}")
                hidden.append(units)
                width, reason = units, f"the units of {layer}"
            expect("dnn/logits/kernel", (width, 1), f"{reason}, and one logit")
            expect("dnn/logits/bias", (1,), "one logit")
        return cls(columns, tuple(hidden), shapes, why)

    def problems(self, variables: TensorBundle) -> Iterator[str]:
        """Variables that are missing, of another shape or type, and those that nothing asks for."""
        found = variables.entries
        strange = [name for name in found if name not in self.shapes and not _is_of_training(name, found)]
        for name, shape in self.shapes.items():
            if name not in found:
                close = nearest(name, strange)
                yield f"variable '{name}' is missing, which {self.why[name]} asks for{close}"
            elif found[name].shape != shape:
                yield f"variable '{name}' has shape {found[name].shape}; {self.why[name]} asks for {shape}"
            elif not found[name].type.endswith("float16") and not found[name].type.startswith("float"):
                yield f"variable '{name}' holds {found[name].type}; expected floats"
        yield from (f"variable '{name}' {found[name].shape}: {self._unasked(name)}" for name in strange)
        for column in self.columns.deep:
            if _embedding_dim(column) is None and column.num_weights >= INDICATOR_MOST_IDS:
                yield (
                    f"column '{column.name}' enters the MLP one-hot with {column.num_weights:,} ids; "
                    f"wide_deep takes fewer than {INDICATOR_MOST_IDS:,}"
                )

    def _unasked(self, name: str) -> str:
        """Why a variable was not mapped, and what may help."""
        if re.search(r"batch_?norm", name):
            return "batch normalisation, which wide_deep does not have"
        if "shared_embedding" in name:
            return "an embedding that several columns share, which is not mapped"
        known = {column.name: column for column in self.columns.columns}
        wide = re.fullmatch(rf"{LINEAR}/(.+)/weights", name)
        deep = re.fullmatch(rf"{INPUTS}/(.+)_embedding/embedding_weights", name)
        column = (wide or deep or re.fullmatch("()", ""))[1]  # type: ignore[index]
        if column in known:
            key = '"wide": true' if wide else 'an "embedding_dim"'
            return f"column '{column}' of the columns file does not ask for it; give it {key}"
        if wide or deep:
            return f"the columns file has no column '{column}'{nearest(column, known)}"
        if name == BIAS:
            return 'the columns file has no column with "wide": true'
        if re.fullmatch(r"dnn/(hiddenlayer_\d+|logits)/(kernel|bias)", name) and not self.columns.deep:
            return "the columns file has no column that the MLP reads"
        return f"is none of a DNNLinearCombinedClassifier's{nearest(name, self.shapes)}"


def _is_of_training(name: str, known: Iterable[str]) -> bool:
    owners = {name[:place] for place, letter in enumerate(name) if letter == "/"}
    return PASSED_OVER.match(name) is not None or any(other in owners for other in known)


def _wide_name(column: Column) -> str:
    return f"{LINEAR}/{column.name}/weights"


def _deep_name(column: Column) -> str:
    return f"{INPUTS}/{column.name}_embedding/embedding_weights"


def _embedding_dim(column: Column) -> int | None:
    return None if isinstance(column, Numeric) else column.embedding_dim


def _size(column: Column) -> str:
    return "one number" if isinstance(column, Numeric) else f"{column.num_weights:,} ids"


# --- what the graph says ---------------------------------------------------------------------------------------------


def _problems_of_graph(columns: Columns, saved: Saved, hidden: Sequence[int]) -> Iterator[str]:
    """What no variable shows: another activation than relu, numbers that are normalised, another key of a cross."""
    if saved.graph is None:
        return
    operations = [own for own in tensorbundle.operations(saved.graph) if not own.name.startswith(("training/", "save"))]
    for layer in range(len(hidden)):
        kinds = {own.type for own in operations if f"dnn/hiddenlayer_{layer}/BiasAdd" in own.inputs}
        if kinds and "Relu" not in kinds:
            yield f"hidden layer {layer} goes on with {' and '.join(sorted(kinds))}; wide_deep has relu alone"
    names = {column.name for column in columns.columns}
    for column in columns.read:
        own = list(_operations_of(column, operations, names))
        if isinstance(column, Numeric) and not column.is_normalized:
            kinds = {each.type for each in own} - MOVES
            if kinds:
                yield (
                    f"column '{column.name}' has a normalizer_fn ({', '.join(sorted(kinds))}); if it is "
                    '(x - mean) / std, give the column "mean" and "std"; if another, apply it to the rows '
                    'and give "std": 1'
                )
        if isinstance(column, Cross):
            keys = {each.numbers["hash_key"] for each in own if "hash_key" in each.numbers} - {CROSS_KEY}
            yield from (f"column '{column.name}' has the hash_key {key}, which is not mapped" for key in sorted(keys))


def _operations_of(column: Column, operations: Iterable[Operation], names: Iterable[str]) -> Iterator[Operation]:
    """The operations in a column's scope, whose name TensorFlow may have numbered."""
    others = set(names) - {column.name}
    scope = re.compile(rf"(?:.*/)?(?:input_layer|linear_model)/({re.escape(column.name)}(?:_\d+)?)/[^/]+$")
    for own in operations:
        found = scope.match(own.name)
        if found is not None and found[1] not in others:
            yield own


# --- the bundle ------------------------------------------------------------------------------------------------------


def _specification(columns: Columns, folder: Path) -> FeatureSpec:
    """The specification, with how raw values are encoded beside it."""
    columns.encoders().save(folder)
    roles: dict[str, tuple[str, ...]] = {}
    for column in columns.read:
        roles[column.role] = (*roles.get(column.role, ()), column.name)
    return FeatureSpec(
        {**columns.features(), columns.label: Feature(dtype="float32")},
        channels={**roles, "label": (columns.label,)},
        metadata={"dataset": "tensorflow", "encoders": ENCODERS_FILE, "vocabularies": VOCABULARIES},
        folder=folder,
    )


def _settings(columns: Columns, hidden: Sequence[int]) -> WideDeepSettings:
    widths = {column.name: _embedding_dim(column) for column in columns.deep}
    given: dict[str, object] = {
        "dropout": 0.0,
        "embedding_dims": {name: width for name, width in widths.items() if width is not None},
        "indicators": [c.name for c in columns.deep if widths[c.name] is None and not isinstance(c, Numeric)],
        "combiner": "mean",
        "use_wide": bool(columns.wide),
        "use_deep": bool(columns.deep),
        "wide_features": [column.name for column in columns.wide],
        "deep_features": [column.name for column in columns.deep],
    }
    return WideDeepSettings.model_validate(given | ({"hidden": list(hidden)} if hidden else {}))


def _fill_wide(wide: Wide, columns: Columns, values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for column in columns.wide:
        own = values[_wide_name(column)]
        if column.name in wide.ids:
            _fill_table(wide.tables, "wide.tables", column.name, own, weights)
        else:
            weights["wide.slopes"][wide.numbers.index(column.name)] = own[0, 0]
    weights["wide.bias"].copy_(values[BIAS])


def _fill_deep(deep: Deep, columns: Columns, values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Kernels (in, out) become weights (out, in); the first one's rows move to where recspec lays each feature."""
    rows: dict[str, slice] = {}
    end = 0
    for column in columns.deep:
        rows[column.name] = slice(end, end + column.deep_width)
        end += column.deep_width
        if _embedding_dim(column) is not None:
            _fill_table(deep.embeddings, "deep.embeddings", column.name, values[_deep_name(column)], weights)
    num_layers = len(deep.mlp.layers)
    for layer in range(num_layers):
        kernel = values[f"dnn/hiddenlayer_{layer}/kernel"].T
        if layer:
            weights[f"deep.mlp.layers.{layer}.weight"].copy_(kernel)
        else:
            at = 0
            for name in (
                *(deep.embeddings.order() if hasattr(deep, "embeddings") else ()),
                *deep.indicators,
                *deep.numbers,
            ):
                at += name in deep.indicators  # the column of id 0, a missing value, for which TensorFlow adds nothing
                width = rows[name].stop - rows[name].start
                weights["deep.mlp.layers.0.weight"][:, at : at + width] = kernel[:, rows[name]]
                at += width
        weights[f"deep.mlp.layers.{layer}.bias"].copy_(values[f"dnn/hiddenlayer_{layer}/bias"])
    weights["deep.out.weight"].copy_(values["dnn/logits/kernel"].T)
    weights["deep.out.bias"].copy_(values["dnn/logits/bias"])


def _fill_table(tables: Embeddings, module: str, feature: str, own: Tensor, weights: Mapping[str, Tensor]) -> None:
    """A feature's rows from id 1 on; that of id 0, a missing value, stays zeros."""
    first = tables.first_row[feature] + 1
    weights[f"{module}.stores.{tables.widths[feature]}"][first : first + len(own)] = own


def _numbers(variables: TensorBundle, name: str) -> Tensor:
    array: Array = variables.read(name)
    tensor = torch.from_numpy(np.array(array, np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{variables.prefix}: variable '{name}' holds numbers that are not finite")
    return tensor


def _steps(variables: TensorBundle) -> int | None:
    """How long TensorFlow trained, where it says so."""
    found = variables.entries.get("global_step")
    if found is None or found.shape or not found.type.startswith("int"):
        return None
    return int(variables.read("global_step").astype(np.int64))
