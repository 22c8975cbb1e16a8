"""The inputs and outputs of an exported program: one named tensor a feature, and the probabilities.

Every tensor has two dimensions: (B, 1) for a scalar feature, (B, length) for a list, (B, 1) for an output. In the form
`ranker` B is 1 for features of the request, and the number of candidates for features of the item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recspec.base.errors import BundleError, SettingsError, shortened
from recspec.feature_spec.model import FeatureSpec
from recspec.feature_spec.sections import MOST_IDS, MOST_VALUES

Form = Literal["rows", "ranker"]
FORMS: tuple[Form, ...] = get_args(Form)
Level = Literal["row", "request", "item"]
PortType = Literal["int32", "int64", "float32", "float64", "string"]

_Read = TypeVar("_Read", bound=BaseModel)

PROBABILITY, LOGIT = "probability", "logit"
OUTPUTS = (PROBABILITY, LOGIT)
RANKING_OUTPUTS = ("sigmoid", LOGIT)
"""Outputs of a model that only ranks: its sigmoid lies between 0 and 1, and is no probability."""


def probability_of(label: str) -> str:
    """The output, or column of predictions, with the probability of a label besides the first."""
    return f"{PROBABILITY}_{label}"


def is_output(name: str) -> bool:
    """Whether some model has an output of this name."""
    return name in (*OUTPUTS, *RANKING_OUTPUTS) or name.startswith(probability_of(""))


EXPORT_FILE = "export.json"  # describes an export: its signature and its measurements


@dataclass(frozen=True)
class Port:
    """One input: its feature (or raw column), its type and width, and the level of its rows."""

    name: str
    dtype: PortType
    width: int
    level: Level
    num_ids: int | None = None  # ids lie in [0, num_ids); None for numbers and raw values
    is_list: bool = False
    has_unknown: bool = False  # id 0 is no real value, and an exported program reads ids outside the range as 0

    @property
    def ids(self) -> str:
        """What the ids of an exported program may be, in words; empty for numbers."""
        if self.num_ids is None:
            return ""
        return f"ids 0 to {self.num_ids - 1}; any other is {'0, unknown' if self.has_unknown else 'answered by NaN'}"


@dataclass(frozen=True)
class Signature:
    """The inputs of an exported model, in order, its form, and the names of its outputs."""

    form: Form
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...] = OUTPUTS

    def of_level(self, *levels: Level) -> tuple[Port, ...]:
        """The inputs of some levels."""
        return tuple(port for port in self.inputs if port.level in levels)

    def to_dict(self) -> dict[str, object]:
        """As `export.json` keeps it."""
        return {"form": self.form, "inputs": [asdict(port) for port in self.inputs], "outputs": list(self.outputs)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = f"{EXPORT_FILE}: signature") -> Signature:
        """Read the output of `to_dict`. Raises `BundleError`, which names the place, if the data has another shape."""
        read = _validated(_SignatureOfFile, data, where)
        return cls(read.form, tuple(Port(**dict(each)) for each in read.inputs), tuple(read.outputs))


# --- export.json -----------------------------------------------------------------------------------------------------


class _OfFile(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _Input(_OfFile):
    name: str = Field(min_length=1)
    dtype: Literal["int32", "int64", "float32"]
    width: int = Field(ge=1, le=MOST_VALUES)
    level: Level
    num_ids: int | None = Field(None, ge=1, le=MOST_IDS)
    is_list: bool = False
    has_unknown: bool = False

    @model_validator(mode="after")
    def _ids_have_a_number(self) -> Self:
        if (self.num_ids is None) != (self.dtype == "float32"):
            raise ValueError(f"dtype is {self.dtype} and num_ids {self.num_ids}; ids have num_ids, numbers have none")
        return self


class _SignatureOfFile(_OfFile):
    form: Form
    inputs: list[_Input] = Field(min_length=1)
    outputs: list[str] = list(OUTPUTS)

    @model_validator(mode="after")
    def _is_as_written(self) -> Self:
        others = [name for name in self.outputs[len(OUTPUTS) :] if name.startswith(probability_of(""))]
        if self.outputs not in ([*OUTPUTS, *dict.fromkeys(others)], [*RANKING_OUTPUTS]):
            expected = f"{[*OUTPUTS]} or {[*RANKING_OUTPUTS]}"
            raise ValueError(f"outputs is {shortened(str(self.outputs))}; expected {expected}")
        if len({each.name for each in self.inputs}) < len(self.inputs):
            raise ValueError("two inputs have one name")
        return self


class _Difference(_OfFile):
    allowed_largest: float | None = Field(None, ge=0)


class _ExportFile(_OfFile):
    """What recspec reads of `export.json`; the rest is for people."""

    signature: _SignatureOfFile
    difference: _Difference = _Difference()
    model: str = ""
    format: str = ""
    precision: str = ""


def check_description(data: object, file: Path) -> None:
    """Check the types and bounds of what is read of an export's `export.json`.

    Raises:
        BundleError: naming the file, and every field that is not as recspec writes it.
    """
    _validated(_ExportFile, data, str(file))


def _validated(kind: type[_Read], data: object, where: str) -> _Read:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise BundleError.of(f"{where}: damaged", map(_told, error.errors())) from None


def _told(problem: Mapping[str, Any]) -> str:
    """A problem of a file's content: where, what was expected, what was found."""
    place = ".".join(map(str, problem["loc"])) or "content"
    message = "expected an object" if problem["type"] == "model_type" else problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" + (
        "" if problem["type"] in ("missing", "value_error") else f"; found {shortened(repr(problem['input']))}"
    )


def find_export_file(folder: Path) -> Path | None:
    """The file that describes the export in a folder, if there is one."""
    return file if (file := folder / EXPORT_FILE).is_file() else None


def signature_of(
    spec: FeatureSpec, features: Sequence[str], form: Form, outputs: tuple[str, ...] = OUTPUTS
) -> Signature:
    """The signature of a model's export.

    Raises:
        SettingsError: for a ranker whose candidates or requests can't differ.
    """
    items = set(spec.role("item"))
    if form == "ranker" and not items & set(features):
        same = "the model reads no feature of the role 'item', so candidates can't differ"
        raise SettingsError(f"form ranker: {same}; name item features in channel_spec, or take --form rows")
    if form == "ranker" and items >= set(features):
        same = "the model reads only features of the role 'item', so requests can't differ"
        raise SettingsError(f"form ranker: {same}; name features of another role in channel_spec, or take --form rows")

    def port(name: str) -> Port:
        feature = spec.features[name]
        level: Level = "row" if form == "rows" else "item" if name in items else "request"
        narrow = feature.dtype in ("bool", "int8", "int16", "int32", "uint8", "uint16")
        dtype: PortType = "float32" if not feature.is_categorical else "int32" if narrow else "int64"
        num_ids = spec.num_ids(name) if feature.is_categorical else None
        has_unknown = feature.is_categorical and spec.reserves_unknown(name)
        return Port(name, dtype, feature.length or 1, level, num_ids, feature.is_list, has_unknown)

    return Signature(form, tuple(map(port, features)), outputs)
