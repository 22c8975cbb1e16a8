"""Tensors of the Open Inference Protocol: from lists and bytes to arrays that fit a model's inputs.

Memory is never allocated by a shape alone; the shape must agree with the data. A wrong request raises `RequestError`,
with status 413 for too many rows and 400 for anything else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import RequestError, how_many, listed, nearest, quoted, unknown
from recspec.feature_spec import OUTPUTS, RANKING_OUTPUTS, Port, PortType, is_output

Values = NDArray[Any]

EVERY = ""
"""Stands for every output of the model, in a request that names none."""

KNOWN_OUTPUTS = tuple(dict.fromkeys((*OUTPUTS, *RANKING_OUTPUTS)))
"""Outputs that some model has."""

DATATYPES: Mapping[PortType, str] = {
    "int32": "INT32",
    "int64": "INT64",
    "float32": "FP32",
    "float64": "FP64",
    "string": "BYTES",
}
"""Type of a port -> the protocol's name."""

STORED: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}
"""The protocol's name -> numpy type; BYTES has none."""

UNSIGNED: Mapping[str, type[np.unsignedinteger[Any]]] = {"int32": np.uint32, "int64": np.uint64}
"""Type of ids -> the type that reads their bits as numbers from 0."""

FLOATS = ("float32", "float64")

NULLABLE = {int, float, type(None)}
"""Types of the values in FP64."""
MAX_DIMS = 8
MAX_VALUES = 2**48
"""Most values of a shape, with 0 counted as 1; numpy refuses even an empty array of 2**63 bytes."""
MAX_INPUTS = 4096
"""Most tensors of a request; reading one takes at least 50 µs."""
KNOWN = 64
"""Heads of requests that are kept parsed; a head says names, types and shapes."""
KNOWN_BYTES = 8 << 10
"""Largest head that is kept. Filled with the shortest inputs of distinct names, 64 of them take 11 MiB over gRPC."""
NAMED = 10
"""Unknown inputs that a message names; finding the nearest name takes 0.1 ms."""


class Declared(NamedTuple):
    """An input as a request declares it, without its values."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """A request for inference without its values."""

    inputs: tuple[Declared, ...]
    outputs: Mapping[str, bool]
    """Name, or `EVERY`, -> whether the answer over HTTP holds it in binary, in the order of the answer."""
    timeout: float | None
    """Seconds; None for the server's limit."""
    id: str = ""


class Tensor(NamedTuple):
    """A named array from a client; BYTES are texts in an object array."""

    name: str
    datatype: str
    values: Values


@dataclass(frozen=True)
class InferRequest:
    """A request for inference, parsed but not yet checked against a model."""

    model_name: str
    model_version: str
    id: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, bool]
    timeout: float | None


def wrong_input(name: str, why: str) -> RequestError:
    """The error for an input."""
    return RequestError(f"input '{name}': {why}")


def refuse_rows(rows: int, max_rows: float) -> None:
    """Refuse a request of too many rows."""
    if rows > max_rows:
        raise RequestError(f"the request has {rows} rows; at most {max_rows} are taken", status=413)


def declare(inputs: Collection[tuple[object, object, object, Container[str]]], max_rows: float) -> tuple[Declared, ...]:
    """The inputs of a request by their names, datatypes, shapes and parameters, checked without a model."""
    if len(inputs) > MAX_INPUTS:  # before they are read
        raise RequestError(f"the request has {len(inputs)} inputs; at most {MAX_INPUTS} are read")
    found: dict[str, Declared] = {}
    for name, datatype, shape, parameters in inputs:
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise RequestError("an input lacks its 'name' or its 'datatype'; expected texts")
        if "shared_memory_region" in parameters:
            raise wrong_input(name, "shared memory is not supported; send the tensor")
        if name in found:
            raise RequestError(f"input '{name}' is there twice")
        found[name] = Declared(name, datatype, shape_of(shape, name, max_rows))
    return tuple(found.values())


def declare_outputs(outputs: Iterable[tuple[object, Mapping[str, Any]]], *, binary: bool = True) -> Mapping[str, bool]:
    """The wanted outputs by their names and parameters, each with whether it is binary, by default `binary`."""
    wanted: dict[str, bool] = {}
    for name, parameters in outputs:
        if parameters.get("classification") or "shared_memory_region" in parameters:
            raise RequestError("an output's 'classification' and shared memory are not supported")
        if not isinstance(name, str) or not is_output(name):
            raise RequestError(unknown("output", str(name)[:80], KNOWN_OUTPUTS))
        if name in wanted:
            raise RequestError(f"output '{name}' is asked for twice")
        wanted[name] = parameters.get("binary_data", binary) is True
    return wanted or {EVERY: binary}


def outputs_of(asked: Mapping[str, bool], given: Collection[str]) -> Mapping[str, bool]:
    """The outputs to send, each with whether it is binary. Raises `RequestError` if the model has no such output."""
    if EVERY in asked:
        return dict.fromkeys(given, asked[EVERY])
    if strange := [name for name in asked if name not in given]:
        raise RequestError(unknown("output", strange, given))
    return asked


def timeout_of(microseconds: object) -> float | None:
    """Seconds of the request parameter `timeout`; None, for the server's limit, if it is 0 or missing."""
    if microseconds is None or (type(microseconds) is int and microseconds == 0):
        return None
    if type(microseconds) is not int or not 0 < microseconds < 2**63:
        raise RequestError(f"parameter 'timeout' is {str(microseconds)[:40]}; expected microseconds, a whole number")
    return microseconds / 1e6


def shape_of(given: object, name: str, max_rows: float = math.inf) -> tuple[int, ...]:
    """A shape from a request."""
    if isinstance(given, list) and len(given) <= MAX_DIMS:
        values = 1
        for each in given:
            if type(each) is not int or not 0 <= each < 2**63:
                break
            values *= each or 1
        else:
            if given:
                refuse_rows(given[0], max_rows)
            if values <= MAX_VALUES:
                return tuple(given)
    expected = f"a list of at most {MAX_DIMS} whole numbers from 0, their product at most {MAX_VALUES}"
    raise wrong_input(name, f"shape is {str(given)[:80]}; expected {expected}")


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """A tensor from its raw little-endian bytes; each BYTES element follows its length in 4 bytes."""
    kind = _stored(name, datatype)
    if kind is None:
        texts = _texts(name, data, math.prod(shape))
        return Tensor(name, datatype, np.array(texts, object).reshape(shape))
    expected = kind.itemsize
    for each in shape:
        expected *= each
    if len(data) != expected:
        raise wrong_input(name, f"{len(data)} bytes; {datatype} of shape {list(shape)} takes {expected} bytes")
    return Tensor(name, datatype, np.ndarray(shape, kind, data))


def from_values(name: str, datatype: str, shape: Sequence[int], data: object) -> Tensor:
    """A tensor from a list of values, nested or flat."""
    kind = _stored(name, datatype)
    if not isinstance(data, list):
        raise wrong_input(name, f"data is {quoted(data)}; expected a list")
    values = _texts_of(name, data) if kind is None else _numbers_of(name, datatype, kind, data)
    if values.size != math.prod(shape):
        held = how_many(values.size, "value")
        raise wrong_input(name, f"data holds {held}; shape {list(shape)} has {math.prod(shape)}")
    return Tensor(name, datatype, values.reshape(shape))


def to_bytes(values: Values) -> bytes:
    """The raw little-endian bytes of numbers."""
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()


def _stored(name: str, datatype: str) -> np.dtype[Any] | None:
    """The numpy type of a datatype; None for BYTES."""
    found = STORED.get(datatype)
    if found is None and datatype != "BYTES":
        known, shown = [*STORED, "BYTES"], datatype[:40]
        raise wrong_input(name, f"unknown datatype {shown!r}{nearest(shown, known)}; known: {listed(known)}")
    return found


def _texts(name: str, data: bytes | memoryview, count: int) -> list[str]:
    if count * 4 > len(data):
        raise wrong_input(name, f"{len(data)} bytes can't hold {count} BYTES elements")
    texts: list[str] = []
    at = 0
    try:
        for _ in range(count):
            (length,) = struct.unpack_from("<I", data, at)
            end = at + 4 + length
            if end > len(data):
                raise wrong_input(name, f"BYTES element {len(texts)} ends after the tensor's last byte")
            texts.append(str(data[at + 4 : end], "utf-8"))
            at = end
    except struct.error:
        raise wrong_input(name, f"the tensor ends before BYTES element {len(texts)}") from None
    except UnicodeDecodeError:
        raise wrong_input(name, f"BYTES element {len(texts)} is not text in UTF-8") from None
    if at != len(data):
        raise wrong_input(name, f"{len(data) - at} bytes are left after {count} BYTES elements")
    return texts


def _texts_of(name: str, data: list[Any]) -> Values:
    texts = np.array(data, object).ravel()
    wrong = [each for each in texts if not isinstance(each, str)]
    if wrong:
        raise wrong_input(name, f"data holds {str(wrong[0])[:40]}; expected texts, as the datatype is BYTES")
    return texts


def _numbers_of(name: str, datatype: str, kind: np.dtype[Any], data: list[Any]) -> Values:
    """Numbers; null in FP64 is a missing value, as in raw rows."""
    try:
        values = np.asarray(data)
        if values.dtype == object and datatype == "FP64" and {type(each) for each in values.flat} <= NULLABLE:
            values = values.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        raise wrong_input(name, "data is no list of numbers, or a ragged one") from None
    allowed = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[kind.kind]
    if values.size and values.dtype.kind not in allowed:
        what = {"b": "true or false", "i": "whole numbers", "u": "whole numbers", "f": "numbers"}[kind.kind]
        raise wrong_input(name, f"data is not all {what}, as the datatype {datatype} is")
    if kind.kind in "iu" and values.size:
        limits = np.iinfo(kind)
        if int(values.min()) < limits.min or int(values.max()) > limits.max:
            raise wrong_input(name, f"a value does not fit {datatype}")
    with np.errstate(over="ignore"):  # infinite values are refused later, with their row
        return values.astype(kind)


# --- against what a model takes --------------------------------------------------------------------------------------


def checked(tensors: Mapping[str, Tensor], ports: Sequence[Port], max_rows: int) -> tuple[dict[str, Values], int]:
    """The arrays (B, width) of a model's inputs, and B.

    A scalar of shape (B,) becomes (B, 1). Ids must lie in their range; numbers must be finite, or missing if raw.
    The error names every problem.
    """
    problems = _wrong_names(tensors, [port.name for port in ports])
    arrays: dict[str, Values] = {}
    for port in ports:
        if port.name in tensors:
            problem = _of_port(port, tensors[port.name], arrays)
            problems += [f"input '{port.name}': {problem}"] if problem else []
    sizes = {len(array) for array in arrays.values()}
    if len(sizes) > 1:
        shown = ", ".join(f"'{name}' {len(array)}" for name, array in arrays.items())
        problems.append(f"inputs have different numbers of rows: {shown}")
    if sizes:
        refuse_rows(max(sizes), max_rows)
    if not problems and not _all_fit(ports, arrays):
        problems = [found for port in ports if (found := _wrong_value(port, arrays[port.name]))]
    RequestError.refuse("request", problems)
    return arrays, sizes.pop()


def _wrong_names(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
    """The problems of unknown and missing inputs."""
    if tensors.keys() == set(names):
        return []
    strange = [name for name in tensors if name not in names]
    problems = [f"unknown input '{name[:80]}'{nearest(name[:80], names)}" for name in strange[:NAMED]]
    problems += [f"unknown inputs: {len(strange) - NAMED} more"] if len(strange) > NAMED else []
    return problems + [f"input '{name}' is missing" for name in names if name not in tensors]


def _of_port(port: Port, tensor: Tensor, arrays: dict[str, Values]) -> str | None:
    """Put a tensor's (B, width) array into `arrays`, or return the problem."""
    datatype = DATATYPES[port.dtype]
    if tensor.datatype != datatype:
        return f"datatype is {tensor.datatype}; expected {datatype}"
    shape = tensor.values.shape
    if len(shape) == 1 and port.width == 1 and not port.is_list:
        shape = (shape[0], 1)
    if len(shape) != 2 or port.width not in (-1, shape[1]):
        return f"shape is {list(tensor.values.shape)}; expected [-1, {port.width}]"
    arrays[port.name] = tensor.values if tensor.values.shape == shape else tensor.values.reshape(shape)
    return None


def _all_fit(ports: Sequence[Port], arrays: Mapping[str, Values]) -> bool:
    """Whether every value is an id in its range, or a finite number.

    Ports of one type and shape are compared together, which takes a tenth of the time for 39 ports of a row.
    """
    alike: dict[tuple[PortType, bool, tuple[int, ...]], list[Port]] = {}
    for port in ports:
        alike.setdefault((port.dtype, port.num_ids is None, arrays[port.name].shape), []).append(port)
    for (dtype, is_number, _), group in alike.items():
        if is_number and dtype not in FLOATS:
            continue
        values = np.concatenate([arrays[port.name] for port in group], axis=None).reshape(len(group), -1)
        limits = None if is_number else np.array([[port.num_ids] for port in group], UNSIGNED[dtype])
        if _wrong(dtype, values, limits).any():
            return False
    return True


def _wrong(dtype: PortType, values: Values, num_ids: Values | int | None) -> Values:
    """Which values are no ids below their limits, or no finite numbers; a raw number may be missing."""
    if num_ids is not None:
        return np.asarray(values.view(UNSIGNED[dtype]) >= num_ids)  # a negative id is larger than any
    return np.isinf(values) if dtype == "float64" else ~np.isfinite(values)


def _wrong_value(port: Port, array: Values) -> str | None:
    if port.num_ids is None and port.dtype not in FLOATS:
        return None
    wrong = _wrong(port.dtype, array, port.num_ids)
    if not wrong.any():
        return None
    expected = "a finite number" if port.num_ids is None else f"an id in [0, {port.num_ids})"
    row, place = np.argwhere(wrong)[0]
    return f"input '{port.name}': row {row + 1} ({port.name}[{row}]) is {array[row, place]}; expected {expected}"
