"""What clients send, read to the letter; what hostile ones send, refused with a message."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recspec.base.errors import RequestError
from recspec.feature_spec.signature import Port
from recspec.serving.inference_protocol import parse_infer
from recspec.serving.tensors import EVERY, Tensor, checked, from_bytes, from_values, outputs_of, shape_of, to_bytes

IDS = Port("item", "int32", 1, "row", 10)
TAGS = Port("tags", "int64", 3, "row", 5, True)
PRICE = Port("price", "float32", 1, "row")
PORTS = (IDS, TAGS, PRICE)


def tensor(name: str = "item", **changes: object) -> dict[str, object]:
    told = {"name": name, "datatype": "INT32", "shape": [2, 1], "data": [1, 2], **changes}
    return {key: value for key, value in told.items() if value is not None}


def body(*inputs: object, **more: object) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def with_binary(head: dict[str, Any], *parts: bytes) -> tuple[bytes, str]:
    text = json.dumps(head).encode()
    return b"".join([text, *parts]), str(len(text))


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_request_in_json_is_read() -> None:
    asked = parse_infer(body(tensor(), tensor("price", datatype="FP32", data=[[0.5], [2]]), id="a"))
    assert asked.id == "a"
    assert asked.inputs["item"].values.tolist() == [[1], [2]]
    assert asked.inputs["item"].values.dtype == np.int32
    assert asked.inputs["price"].values.tolist() == [[0.5], [2.0]]
    assert asked.outputs == {EVERY: False}
    assert asked.timeout is None


def test_binary_tensors_follow_the_head_in_order() -> None:
    ids, prices = np.array([[3], [4]], "<i4"), np.array([[1.5], [2.5]], "<f4")
    head = {
        "inputs": [
            tensor(data=None, parameters={"binary_data_size": 8}),
            tensor("tags", datatype="INT64", shape=[2, 1], data=[7, 8]),
            tensor("price", datatype="FP32", data=None, parameters={"binary_data_size": 8}),
        ],
        "outputs": [{"name": "logit", "parameters": {"binary_data": True}}, {"name": "probability"}],
        "parameters": {"timeout": 2_500_000},
    }
    asked = parse_infer(*with_binary(head, ids.tobytes(), prices.tobytes()))
    assert [each.values.ravel().tolist() for each in asked.inputs.values()] == [[3, 4], [7, 8], [1.5, 2.5]]
    assert list(asked.outputs.items()) == [("logit", True), ("probability", False)]
    assert asked.timeout == 2.5


def test_every_output_is_binary_where_the_request_says_so() -> None:
    asked = parse_infer(body(tensor(), parameters={"binary_data_output": True}))
    assert asked.outputs == {EVERY: True}
    assert outputs_of(asked.outputs, ("sigmoid", "logit")) == {"sigmoid": True, "logit": True}
    with pytest.raises(RequestError, match="unknown output 'probability'; known: 'sigmoid', 'logit'"):
        outputs_of({"probability": True}, ("sigmoid", "logit"))


def test_texts_stand_behind_their_lengths() -> None:
    data = b"".join(struct.pack("<I", len(each)) + each for each in (b"a", "üß".encode(), b""))
    assert from_bytes("user", "BYTES", [3, 1], data).values.tolist() == [["a"], ["üß"], [""]]
    assert from_values("user", "BYTES", [3], ["a", "üß", ""]).values.tolist() == ["a", "üß", ""]


def test_missing_raw_numbers_are_null_and_nan() -> None:
    given = from_values("age", "FP64", [3], [1, None, 2.5])
    assert np.array_equal(given.values, [1, np.nan, 2.5], equal_nan=True)
    arrays, rows = checked({"age": given}, [Port("age", "float64", 1, "row")], 10)
    assert (rows, arrays["age"].shape) == (3, (3, 1))
    infinite = Tensor("age", "FP64", np.array([1, np.inf]))
    with pytest.raises(RequestError, match=r"input 'age': row 2 \(age\[1\]\) is inf; expected a finite number"):
        checked({"age": infinite}, [Port("age", "float64", 1, "row")], 10)


def test_bytes_of_an_array_are_little_endian_rows_first() -> None:
    assert to_bytes(np.array([[1, 2], [3, 4]], ">f4").T) == np.array([1, 3, 2, 4], "<f4").tobytes()


def test_a_scalar_s_rows_may_come_without_their_second_dimension() -> None:
    arrays, rows = checked(
        {
            "item": from_values("item", "INT32", [2], [0, 9]),
            "tags": from_values("tags", "INT64", [2, 3], [[0, 1, 2], [3, 4, 0]]),
            "price": from_values("price", "FP32", [2, 1], [1, -1]),
        },
        PORTS,
        2,
    )
    assert rows == 2
    assert {name: array.shape for name, array in arrays.items()} == {"item": (2, 1), "tags": (2, 3), "price": (2, 1)}


def test_a_head_that_is_sent_again_is_read_with_its_own_bytes() -> None:
    head = {"inputs": [tensor(data=None, parameters={"binary_data_size": 8})], "id": "a"}
    for values in ([1, 2], [3, 4]):
        asked = parse_infer(*with_binary(head, np.array(values, "<i4").tobytes()), 10)
        assert (asked.id, asked.inputs["item"].values.tolist()) == ("a", [[values[0]], [values[1]]])
    for rest, message in ((b"1234567", "has 7 bytes left"), (b"123456789", "1 bytes are left")):
        with pytest.raises(RequestError, match=message):
            parse_infer(*with_binary(head, rest), 10)
    with pytest.raises(RequestError, match="has 2 rows; at most 1"):
        parse_infer(*with_binary(head, b"12345678"), 1)


def test_ports_of_one_type_have_each_its_own_range() -> None:
    ports = (Port("a", "int32", 1, "row", 10), Port("b", "int32", 1, "row", 3), Port("c", "int64", 1, "row", 2**40))
    given = {
        "a": from_values("a", "INT32", [2], [9, 0]),
        "b": from_values("b", "INT32", [2], [2, 0]),
        "c": from_values("c", "INT64", [2], [2**40 - 1, 0]),
    }
    assert checked(given, ports, 10)[1] == 2
    for name, value, most in (("b", 3, 3), ("b", -1, 3), ("a", -(2**31), 10), ("c", -1, 2**40), ("c", 2**40, 2**40)):
        wrong = from_values(name, given[name].datatype, [2], [0, value])
        with pytest.raises(RequestError, match=rf"row 2 \({name}\[1\]\) is {value}; expected an id in \[0, {most}\)"):
            checked({**given, name: wrong}, ports, 10)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "the request's head is not JSON"),
        (b"[]", "the request's head is '..'; expected a JSON object"),
        (b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not JSON|no list of objects"),
        (b'{"inputs": [{"name": "item", "datatype": "FP32", "shape": [1], "data": [NaN]}]}', "not JSON"),
        (b"{}", "'inputs' is no list of objects"),
        (body(*[{}] * 4097), "the request has 4097 inputs; at most 4096 are read"),
        (body(tensor(datatype=None)), "an input lacks its 'name' or its 'datatype'"),
        (body(tensor(datatype="INT31")), "input 'item': unknown datatype 'INT31' .did you mean 'INT32'"),
        (body(tensor(shape=None)), "input 'item': shape is None; expected a list"),
        (body(tensor(shape=[-1, 1])), r"shape is \[-1, 1\]"),
        (body(tensor(shape=[2.0])), r"shape is \[2.0\]"),
        (body(tensor(shape=[1] * 9)), "shape is"),
        (body(tensor(shape=[2**62, 2**62])), f"shape is .*; expected a list .* from 0, their product at most {2**48}"),
        (body(tensor(data=None)), "input 'item': data is 'None'; expected a list"),
        (body(tensor(data=[1])), r"data holds 1 value; shape \[2, 1\] has 2"),
        (body(tensor(data=[1, "2"])), "not all whole numbers, as the datatype INT32 is"),
        (body(tensor(data=[1, 2.5])), "not all whole numbers"),
        (body(tensor(data=[[1], [2, 3]])), "data is no list of numbers, or a ragged one"),
        (body(tensor(data=[1, 2**31])), "a value does not fit INT32"),
        (body(tensor(data=[1, 2**64])), "not JSON|not all whole numbers|not fit"),
        (body(tensor(datatype="BYTES", data=["a", 1])), "data holds 1; expected texts"),
        (body(tensor(), tensor()), "input 'item' is there twice"),
        (body(tensor(), id=7), "'id' is 7; expected a text"),
        (body(tensor(), parameters=[1]), "parameters are '.1.'; expected an object"),
        (body(tensor(), parameters={"timeout": -1}), "parameter 'timeout' is -1; expected microseconds"),
        (body(tensor(), outputs=[{"name": "logits"}]), "unknown output 'logits' .did you mean 'logit'"),
        (body(tensor(), outputs=[{"name": "logit"}] * 2), "output 'logit' is asked for twice"),
        (body(tensor(), outputs=[{"name": "logit", "parameters": {"classification": 2}}]), "not supported"),
        (body(tensor(data=None, parameters={"shared_memory_region": "x"})), "shared memory is not supported"),
        (body(tensor(data=None, parameters={"binary_data_size": 8})), "binary_data_size is 8; the body has 0 bytes"),
        (body(tensor(parameters={"binary_data_size": 0})), "has 'data' and 'binary_data_size'"),
        (body(tensor(data=None, parameters={"binary_data_size": -1})), "binary_data_size is -1"),
    ],
)
def test_a_request_that_is_wrong_is_told_so(sent: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        parse_infer(sent)
    assert refused.value.status == 400


@pytest.mark.parametrize("length", ["", "-1", "1e3", "9" * 30, "١", "0x10", "99999", "10 "])
def test_a_header_length_that_is_none_is_refused(length: str) -> None:
    with pytest.raises(RequestError, match="Inference-Header-Content-Length is"):
        parse_infer(body(tensor()), length)


def test_binary_tensors_that_are_cut_or_too_long_are_refused() -> None:
    head = {"inputs": [tensor(data=None, parameters={"binary_data_size": 8})]}
    with pytest.raises(RequestError, match="binary_data_size is 8; the body has 7 bytes left"):
        parse_infer(*with_binary(head, b"1234567"))
    with pytest.raises(RequestError, match="1 bytes are left after the last binary tensor"):
        parse_infer(*with_binary(head, b"123456789"))
    head = {"inputs": [tensor(data=None, shape=[3, 1], parameters={"binary_data_size": 8})]}
    with pytest.raises(RequestError, match=r"8 bytes; INT32 of shape \[3, 1\] takes 12 bytes"):
        parse_infer(*with_binary(head, b"12345678"))


@pytest.mark.parametrize(
    ("count", "data", "message"),
    [
        (2**60, b"\0\0\0\0", "4 bytes can't hold"),
        (1, struct.pack("<I", 2**31) + b"abc", "BYTES element 0 ends after the tensor's last byte"),
        (2, struct.pack("<I", 3) + b"abc" + b"\0", "the tensor ends before BYTES element 1"),
        (1, struct.pack("<I", 1) + b"\xff", "BYTES element 0 is not text in UTF-8"),
        (1, struct.pack("<I", 1) + b"ab", "1 bytes are left after 1 BYTES elements"),
    ],
)
def test_texts_that_lie_about_their_lengths_are_refused(count: int, data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        from_bytes("user", "BYTES", [count], data)


def given_tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    good: dict[str, Tensor | None] = {
        "item": from_values("item", "INT32", [2, 1], [0, 9]),
        "tags": from_values("tags", "INT64", [2, 3], [0, 1, 2, 3, 4, 0]),
        "price": from_values("price", "FP32", [2, 1], [1, -1]),
        **changes,
    }
    return {name: each for name, each in good.items() if each is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"item": None}, "request: input 'item' is missing"),
        ({"itm": from_values("itm", "INT32", [2], [0, 1])}, "unknown input 'itm' .did you mean 'item'"),
        ({"item": from_values("item", "INT64", [2, 1], [0, 1])}, "input 'item': datatype is INT64; expected INT32"),
        ({"tags": from_values("tags", "INT64", [2, 2], [0] * 4)}, r"shape is \[2, 2\]; expected \[-1, 3\]"),
        ({"tags": from_values("tags", "INT64", [6], [0] * 6)}, r"shape is \[6\]; expected \[-1, 3\]"),
        ({"item": from_values("item", "INT32", [], [3])}, r"shape is \[\]; expected \[-1, 1\]"),
        ({"item": from_values("item", "INT32", [3, 1], [0] * 3)}, "different numbers of rows: 'item' 3, 'tags' 2"),
        ({"item": from_values("item", "INT32", [2], [1, 10])}, r"row 2 \(item\[1\]\) is 10; expected an id in \[0, 10"),
        ({"item": from_values("item", "INT32", [2], [-1, 1])}, r"row 1 \(item\[0\]\) is -1; expected an id"),
        ({"price": from_bytes("price", "FP32", [2], np.array([0, np.nan], "<f4").tobytes())}, r"price\[1\]\) is nan"),
        ({"price": from_values("price", "FP32", [2], [1e39, 0])}, r"row 1 \(price\[0\]\) is inf; expected a finite"),
    ],
)
def test_tensors_that_a_model_does_not_take_are_refused(changes: dict[str, Tensor | None], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        checked(given_tensors(**changes), PORTS, 10)
    assert refused.value.status == 400


def test_all_problems_are_told_at_once() -> None:
    wrong = {"item": from_values("item", "INT64", [2], [0, 1]), "x": from_values("x", "INT32", [1], [1]), "price": None}
    with pytest.raises(RequestError, match="request: 3 problems") as refused:
        checked(given_tensors(**wrong), PORTS, 10)
    assert len(refused.value.problems) == 3


def test_of_very_many_unknown_inputs_some_are_named() -> None:
    wrong = {f"x{number}": from_values(f"x{number}", "INT32", [1], [1]) for number in range(30)}
    with pytest.raises(RequestError, match="unknown inputs: 20 more") as refused:
        checked(wrong, PORTS, 10)
    assert len(refused.value.problems) == 14  # ten, the others, and three that are missing


def test_too_many_rows_are_refused_with_413_before_they_are_read() -> None:
    with pytest.raises(RequestError, match="the request has 1000000000 rows; at most 100 are taken") as refused:
        parse_infer(body(tensor(shape=[10**9, 1])), None, 100)
    assert refused.value.status == 413
    with pytest.raises(RequestError, match="the request has 2 rows; at most 1 are taken") as refused:
        checked(given_tensors(), PORTS, 1)
    assert refused.value.status == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["item", "tags", "price", "x"]) | JSON,
        "datatype": st.sampled_from(["INT32", "INT64", "FP32", "FP64", "BYTES", "BOOL"]) | JSON,
        "shape": st.lists(st.integers(-1, 4) | st.sampled_from([2**48, 2**62, 2**63]), max_size=3) | JSON,
        "data": st.lists(st.integers(-2, 12) | st.floats() | st.text(max_size=2), max_size=6) | JSON,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 30)}) | JSON,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=3) | JSON},
    optional={"id": JSON, "parameters": JSON, "outputs": st.lists(JSON, max_size=2) | JSON},
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(REQUESTS, st.binary(max_size=30), st.integers(-3, 3))
def test_whatever_is_sent_is_read_or_refused(request: object, rest: bytes, shift: int) -> None:
    head = json.dumps(request).encode()
    with contextlib.suppress(RequestError):  # and nothing else
        asked = parse_infer(head + rest, str(len(head) + shift))
        checked(asked.inputs, PORTS, 100)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 2**62), max_size=4), st.sampled_from(["BYTES", "FP32", "BOOL"]))
def test_whatever_bytes_come_are_a_tensor_or_refused(data: bytes, shape: list[int], datatype: str) -> None:
    with contextlib.suppress(RequestError):
        assert from_bytes("x", datatype, shape_of(shape, "x"), data).values.shape == tuple(shape)


@pytest.mark.parametrize("shape", [[0, 2**62], [0, 2**62, 2**62], [2**63 - 1, 0], [0, *[2**10] * 7]])
def test_an_empty_tensor_of_a_shape_that_no_array_has_is_refused(shape: list[int]) -> None:
    with pytest.raises(RequestError, match=r"whole numbers from 0, their product at most 2814749767"):
        shape_of(shape, "x")
