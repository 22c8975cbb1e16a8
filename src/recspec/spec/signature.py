"""The inputs and outputs of an exported program: one named tensor a feature, and the probabilities.

Every tensor has two dimensions: (B, 1) for a scalar feature, (B, length) for a list, (B, 1) for an output. In the form
`ranker` B is 1 for features of the request, and the number of candidates for features of the item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from recspec.errors import BundleError, SettingsError
from recspec.spec.model import FeatureSpec

Form = Literal["rows", "ranker"]
FORMS: tuple[Form, ...] = get_args(Form)
Level = Literal["row", "request", "item"]
PortType = Literal["int32", "int64", "float32", "float64", "string"]

PROBABILITY, LOGIT = "probability", "logit"
OUTPUTS = (PROBABILITY, LOGIT)

EXPORT_FILE = "export.json"  # describes an export: its signature and its measurements
OLD_EXPORT_FILE = "sheet.json"  # the earlier name of `EXPORT_FILE`; this release still reads it


@dataclass(frozen=True)
class Port:
    """One input: its feature (or raw column), its type and width, and the level of its rows."""

    name: str
    dtype: PortType
    width: int
    level: Level
    num_ids: int | None = None  # ids lie in [0, num_ids); None for numbers and raw values
    is_list: bool = False


@dataclass(frozen=True)
class Signature:
    """The inputs of an exported model, in order, and its form; its outputs are `probability` and `logit`."""

    form: Form
    inputs: tuple[Port, ...]

    def of_level(self, *levels: Level) -> tuple[Port, ...]:
        """The inputs of some levels."""
        return tuple(port for port in self.inputs if port.level in levels)

    def to_dict(self) -> dict[str, object]:
        """As `export.json` keeps it."""
        return {"form": self.form, "inputs": [asdict(port) for port in self.inputs], "outputs": list(OUTPUTS)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Signature:
        """Read the output of `to_dict`. Raises `BundleError` if the data has another shape."""
        try:
            return _SIGNATURE.validate_python({name: data[name] for name in ("form", "inputs")})
        except (KeyError, TypeError, ValidationError) as error:
            raise BundleError(f"{EXPORT_FILE}: damaged: its signature is none that recspec writes: {error}") from None


_SIGNATURE = TypeAdapter(Signature)


def find_export_file(folder: Path) -> Path | None:
    """The file that describes the export in a folder, if there is one."""
    files = (folder / name for name in (EXPORT_FILE, OLD_EXPORT_FILE))
    return next((file for file in files if file.is_file()), None)


def signature_of(spec: FeatureSpec, features: Sequence[str], form: Form) -> Signature:
    """The inputs of a model's export. Raises `SettingsError` for a ranker whose candidates or requests can't differ."""
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
        return Port(name, dtype, feature.length or 1, level, num_ids, feature.is_list)

    return Signature(form, tuple(map(port, features)))
