"""TensorFlow's checkpoints: what is read is what was written, and what is damaged is named."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.tf_import import tensorbundle
from recspec.tf_import.tensorbundle import MOST_INDEX_BYTES, Operation, Slice, TensorBundle, find, operations
from tests import made_up_tensorflow as tf

RNG = np.random.default_rng(0)
VARIABLES: dict[str, np.ndarray] = {
    "a/kernel": RNG.normal(size=(5, 3)).astype(np.float32),
    "a/bias": np.arange(3, dtype=np.float32),
    "a/bias/Adagrad": np.ones(3, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "global_step": np.array(157, np.int64),
    "half": np.array([0.5, -2], np.float16),
    "wide": np.array([[1.5]], np.float64),
}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tf.write_bundle(tmp_path / "model.ckpt-7", VARIABLES)


def read_all(prefix: Path) -> dict[str, np.ndarray]:
    bundle = TensorBundle.open(prefix)
    return {name: bundle.read(name) for name in bundle.entries}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# --- variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_variables_come_back_as_they_were(shards: int, tmp_path: Path) -> None:
    same(read_all(tf.write_bundle(tmp_path / "model", VARIABLES, shards=shards)), VARIABLES)


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    stored = np.array([0x3F80, 0xC000], np.uint16)  # 1 and -2: the upper halves of their float32
    found = read_all(tf.write_bundle(tmp_path / "model", {"x": stored}, kinds={"x": "bfloat16"}))
    same(found, {"x": np.array([1, -2], np.float32)})


@pytest.mark.parametrize(
    "cuts", [[((0, 2), (0, -1)), ((2, 3), (0, -1))], [((0, 5), (0, 1)), ((0, 5), (1, 2))], [((0, -1), (0, -1))]]
)
def test_a_variable_cut_into_slices_is_put_together(cuts: list[tuple[tuple[int, int], ...]], tmp_path: Path) -> None:
    same(read_all(tf.write_bundle(tmp_path / "model", VARIABLES, cuts={"a/kernel": cuts})), VARIABLES)


def test_slices_far_along_and_odd_names_have_keys_too(tmp_path: Path) -> None:
    array = np.arange(20_000, dtype=np.int32)
    cuts = [((0, 64),), ((64, 8128),), ((8192, 11_808),)]
    same(
        read_all(tf.write_bundle(tmp_path / "model", {"tä/b\x00c": array}, cuts={"tä/b\x00c": cuts})),
        {"tä/b\x00c": array},
    )


def test_the_key_of_a_slice_is_tensorflows() -> None:
    """Keys that TensorFlow 2.15.1 wrote: rows 10 to 19 of 30, and 0 to 9 of columns 0 to 4."""
    assert tf.slice_key("v", [(10, 10), (0, 5)]) == b"\x00v\x00\x01\x01\x02\x8a\x8a\x80\x85"
    key = b"\x00v\x00\x01\x01\x02\x8a\x8a\x80\x85"
    assert tensorbundle._slice_key(key) == ("v", Slice(((10, 10), (0, 5))))


@pytest.mark.parametrize(
    "number", [0, 1, 63, 64, 8191, 8192, 2**20, 2**34, 2**48, 2**55, 2**62, -1, -64, -65, -(2**40)]
)
def test_numbers_in_ordered_code_come_back(number: int) -> None:
    coded = tf.ordered(number)
    assert tensorbundle._ordered(b"x" + coded + b"y", 1) == (number, 1 + len(coded))


# --- what can't be read ----------------------------------------------------------------------------------------------


def refused(prefix: Path, name: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        TensorBundle.open(prefix).read(name or "a/kernel")
    return str(caught.value).replace(str(prefix.parent), "DIR")


def test_an_unknown_variable_is_named_with_the_nearest_one(prefix: Path) -> None:
    assert refused(prefix, "a/kernl") == "DIR/model.ckpt-7: no variable 'a/kernl' (did you mean 'a/kernel'?)"


def test_texts_are_named(tmp_path: Path) -> None:
    made = tf.write_bundle(tmp_path / "model", {"words": np.zeros(3, np.uint8)}, kinds={"words": "string"})
    assert (
        refused(made, "words")
        == "DIR/model: variable 'words' (string (3,)): holds string, which is not read; only numbers are"
    )


def test_a_compressed_table_is_named(prefix: Path) -> None:
    file = prefix.with_name("model.ckpt-7.index")
    file.write_bytes(tf.table({b"": tf.proto((1, 1))}, kind=1))
    assert refused(prefix) == (
        "DIR/model.ckpt-7.index: damaged or cut off: a block is compressed with snappy, which is not read; "
        "save the model again without"
    )


def data_file(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.data-00000-of-00001")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "model.ckpt-7.data-00000-of-00001 can't be read: No such file or directory"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:30]),
            "ends beyond model.ckpt-7.data-00000-of-00001: that file was",
        ),
        (
            lambda file: file.write_bytes(b"\x01" + file.read_bytes()[1:]),
            "the checksum of its bytes in model.ckpt-7.data-",
        ),
    ],
)
def test_damaged_data_is_named(damage: Callable[[Path], object], message: str, prefix: Path) -> None:
    damage(data_file(prefix))
    assert refused(prefix).startswith("DIR/model.ckpt-7: variable 'a/kernel' (float32 (5, 3)): " + message)


def test_an_index_cut_off_anywhere_is_named(prefix: Path) -> None:
    file = prefix.with_name("model.ckpt-7.index")
    whole = file.read_bytes()
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        assert refused(prefix).startswith("DIR/model.ckpt-7.index: damaged or cut off: "), end


def test_a_bit_flipped_anywhere_is_an_error_or_changes_nothing(prefix: Path) -> None:
    file = prefix.with_name("model.ckpt-7.index")
    whole = file.read_bytes()
    for place in range(0, len(whole), 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with contextlib.suppress(DataError):
            same(read_all(prefix), VARIABLES)


def written(prefix: Path, entries: dict[bytes, bytes]) -> None:
    """Puts an index of these entries, and of a header where none is among them, in place of the bundle's."""
    prefix.with_name("model.ckpt-7.index").write_bytes(tf.table({b"": tf.proto((1, 1)), **entries}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tf.entry("float32", (2, 2), b"12345678"), "takes 8 bytes; its shape and type ask for another number"),
        (tf.entry("float32", (2**40, 2**40), b"12345678"), "takes 8 bytes; its shape and type ask for another number"),
        (tf.entry("float32", (-1, 2), b""), "a variable has a dimension of unknown size"),
        (tf.entry("float32", (0, 2**50), b""), "a variable has more dimensions, or a longer one, than any model's"),
        (tf.entry("float32", (1,) * 70, b"1234"), "a variable has more dimensions, or a longer one, than any model's"),
        (tf.proto((1, 99)), "holds type number 99, which is not read"),
        (b"\x0a\x63", "a protocol buffer is cut off"),
        (b"\x0f", "a protocol buffer has a field of wire type 7"),
        (b"\x08" + b"\xff" * 11, "a number does not end"),
        (tf.proto((1, b"x")), "a protocol buffer has a message where a number should be"),
        (tf.proto((2, 1)), "a protocol buffer has a number where a message should be"),
        (tf.entry("float32", (4,), slices=[((0, 2),), ((2, 2),)]), "its slice ((0, 2),) is missing"),
        (tf.entry("float32", (4,), slices=[((3, 2),)]), "its slice ((3, 2),) does not fit"),
        (tf.entry("float32", (4,), slices=[((0, 2), (0, 1))]), "its slice ((0, 2), (0, 1)) does not fit"),
    ],
)
def test_entries_that_lie_are_named(value: bytes, message: str, prefix: Path) -> None:
    written(prefix, {b"x": value})
    assert message in refused(prefix, "x")


@pytest.mark.parametrize(
    ("size", "slices", "stored", "message"),
    [
        (4, [((0, 2),)], 2, "its slices are not the whole of it"),
        (4, [((0, 2),), ((0, 2),)], 2, "its slices overlap"),
        (4, [((0, 4),)], 2, "its slice ((0, 4),) is float32 (2,); expected float32 (4,)"),
        (2**39, [((0, 2**39),)], 2**39, "takes 8 bytes; its shape and type ask for another number"),  # and no memory
    ],
)
def test_slices_that_do_not_make_a_whole_are_named(
    size: int, slices: list[tuple[tuple[int, int], ...]], stored: int, message: str, prefix: Path
) -> None:
    data = data_file(prefix).read_bytes()[:8]
    values = {b"x": tf.entry("float32", (size,), slices=slices)}
    written(prefix, values | {tf.slice_key("x", slices[0]): tf.entry("float32", (stored,), data)})
    assert message in refused(prefix, "x")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        *(
            ({key: b""}, "the key of a slice")
            for key in (b"\x00abc", b"\x00a\x00\x01", b"\x00a\x00\x01\x01\x02\x80", b"\x00a\x00\x01\x01\x01\xff\xff")
        ),
        ({b"\xfe\xff": b""}, "damaged: a variable's name is no text"),
        ({b"": tf.proto((1, 1), (2, 1))}, "big-endian, which is not read"),
    ],
)
def test_keys_and_headers_that_are_none_are_named(entries: dict[bytes, bytes], message: str, prefix: Path) -> None:
    written(prefix, entries)
    assert message in refused(prefix, "x")


def written_index(prefix: Path, *blocks: bytes, index: bytes) -> None:
    at = tf.varint(sum(map(len, blocks))) + tf.varint(len(index) - 5)
    footer = (at + at).ljust(40, b"\0") + struct.pack("<Q", tf.MAGIC)
    prefix.with_name("model.ckpt-7.index").write_bytes(b"".join((*blocks, index, footer)))


def test_a_table_without_a_header_is_named(prefix: Path) -> None:
    prefix.with_name("model.ckpt-7.index").write_bytes(tf.table({b"x": tf.entry("float32", ())}))
    assert "it has no header" in refused(prefix, "x")


def test_a_block_told_twice_does_not_fill_memory(prefix: Path) -> None:
    one = tf.block([(b"", tf.proto((1, 1))), (b"x", b"")])
    place = tf.varint(0) + tf.varint(len(one) - 5)
    written_index(prefix, one, index=tf.block([(b"%03d" % number, place) for number in range(200)]))
    assert "its keys do not rise" in refused(prefix, "x")


def test_a_small_index_takes_little_time(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = struct.pack("<301I", *[0] * 300, 300)  # a block without entries, which no rule of keys bounds
    empty = content + b"\0" + struct.pack("<I", tf.masked_crc(content + b"\0"))
    place = tf.varint(0) + tf.varint(len(content))
    written_index(prefix, empty, index=tf.block([(b"%03d" % number, place) for number in range(100)]))
    assert "its blocks overlap" in refused(prefix)
    monkeypatch.setattr(tensorbundle, "MOST_KEY_BYTES", 5_000)
    tiny = tf.block([])
    place = tf.varint(0) + tf.varint(len(tiny) - 5)
    written_index(prefix, tiny, index=tf.block([(b"k" * 1000 + b"%d" % number, place) for number in range(9)]))
    assert "its keys take more than 5,000 bytes" in refused(prefix)


def test_slices_take_no_more_than_the_file_holds(prefix: Path) -> None:
    cuts = [((start, 2),) for start in range(0, 8, 2)]
    values = {b"x": tf.entry("float32", (8,), slices=cuts)}
    data = data_file(prefix).read_bytes()[:8]
    values |= {tf.slice_key("x", cut): tf.entry("float32", (2,), data) for cut in cuts}  # all of them the same bytes
    written(prefix, values)
    assert "its slices overlap in the file" in refused(prefix, "x")


def test_a_pipe_is_named(prefix: Path) -> None:
    data_file(prefix).unlink()
    os.mkfifo(data_file(prefix))
    assert "model.ckpt-7.data-00000-of-00001 is a named pipe" in refused(prefix)


def test_an_index_that_is_too_long_is_not_read(prefix: Path) -> None:
    with prefix.with_name("model.ckpt-7.index").open("r+b") as file:
        file.truncate(MOST_INDEX_BYTES + 1)
    assert refused(prefix) == "DIR/model.ckpt-7.index: has 268,435,457 bytes; at most 268,435,456 are read"


# --- where a checkpoint lies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named", ["", "model.ckpt-7", "model.ckpt-7.index", "model.ckpt-7.meta", "model.ckpt-7.data-00000-of-00001"]
)
def test_a_checkpoint_is_found_by_any_of_its_names(named: str, prefix: Path) -> None:
    prefix.with_name("model.ckpt-7.meta").write_bytes(b"")
    found = find(prefix.parent / named)
    assert (found.prefix, found.graph) == (prefix, prefix.with_name("model.ckpt-7.meta"))


def test_a_folder_of_checkpoints_stands_for_its_latest_even_when_it_was_moved(prefix: Path) -> None:
    tf.write_bundle(prefix.with_name("model.ckpt-0"), {})
    checkpoint = prefix.with_name("checkpoint")
    for named in ("model.ckpt-7", "/far/away/model.ckpt-7"):
        checkpoint.write_text(f'model_checkpoint_path: "{named}"\nall_model_checkpoint_paths: "model.ckpt-0"\n')
        assert find(prefix.parent).prefix == prefix
        assert find(prefix.parent).graph is None


def test_the_latest_checkpoint_lies_in_the_folder(prefix: Path) -> None:
    inside = prefix.parent / "inside"
    inside.mkdir()
    for named in (str(prefix), "../model.ckpt-7", "../inside"):
        prefix.with_name("inside.index").write_bytes(b"")  # beside a folder of its name
        (inside / "checkpoint").write_text(f'model_checkpoint_path: "{named}"')
        with pytest.raises(DataError, match=r"the latest checkpoint is '.*', which is not in this folder; found none"):
            find(inside)


def test_a_saved_model_is_found_by_its_folder_or_its_file(tmp_path: Path) -> None:
    made = tf.write_bundle(tmp_path / "exported" / "variables" / "variables", VARIABLES)
    assert find(tmp_path / "exported").graph is None
    (tmp_path / "exported" / "saved_model.pb").write_bytes(b"")
    for named in ("exported", "exported/saved_model.pb"):
        found = find(tmp_path / named)
        assert (found.prefix, found.graph) == (made, tmp_path / "exported" / "saved_model.pb")


def test_what_is_not_there_is_said(prefix: Path) -> None:
    folder = prefix.parent

    def said(path: Path) -> str:
        with pytest.raises(DataError) as caught:
            find(path)
        return str(caught.value).replace(str(folder), "DIR")

    assert said(folder / "model.ckpt-8") == (
        "DIR/model.ckpt-8: no such folder or checkpoint (did you mean 'model.ckpt-7'?)"
    )
    (folder / "alone.meta").write_bytes(b"")
    assert said(folder / "alone.meta") == "DIR/alone.meta: no index (PREFIX.index) beside it"
    (folder / "none").mkdir()
    assert said(folder / "none") == (
        "DIR/none: neither a SavedModel (variables/variables.index) nor a folder of checkpoints (checkpoint, *.index)"
    )
    tf.write_bundle(folder / "other", {})
    for saved in ("export/best/17", "export/best/18"):
        (folder / saved / "variables").mkdir(parents=True)
        (folder / saved / "saved_model.pb").touch()
        (folder / saved / "variables" / "variables.index").touch()
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint").touch()
    (folder / "run" / "model.ckpt-1.index").touch()
    assert said(folder) == (
        "DIR: holds 5 models; name the one to import:\n  DIR/export/best/17\n  DIR/export/best/18\n"
        "  DIR/model.ckpt-7\n  DIR/other\n  DIR/run"
    )
    (folder / "around" / "one").mkdir(parents=True)
    (folder / "around" / "one" / "saved_model.pb").touch()
    assert said(folder / "around") == "DIR/around: holds a model further in; name the one to import:\n  DIR/around/one"
    (folder / "checkpoint").write_text("\n" * 1_000_000)  # hours, if each blank line were read from every other
    assert said(folder) == "DIR/checkpoint: names no model_checkpoint_path"
    (folder / "checkpoint").write_text("all_model_checkpoint_paths: 'x'\n")
    assert said(folder) == "DIR/checkpoint: names no model_checkpoint_path"
    (folder / "checkpoint").write_text('model_checkpoint_path: "gone"\n')
    assert said(folder) == (
        "DIR/checkpoint: the latest checkpoint is 'gone', which is not in this folder; found 'model.ckpt-7', 'other'"
    )


# --- graphs ----------------------------------------------------------------------------------------------------------

NODES = (("a/Relu", "Relu", ("a/BiasAdd", "b"), {}), ("x", "SparseCross", (), {"hash_key": 956888297470, "N": -1}))


@pytest.mark.parametrize("name", ["model.meta", "saved_model.pb"])
def test_operations_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    meta = tf.graph(*NODES)
    (tmp_path / name).write_bytes(tf.proto((1, 1), (2, meta)) if name.endswith(".pb") else meta)
    assert operations(tmp_path / name) == [Operation(*node) for node in NODES]


def test_a_damaged_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.meta").write_bytes(tf.graph(*NODES)[:-3])
    with pytest.raises(DataError, match=r"model.meta: damaged or cut off: a protocol buffer is cut off"):
        operations(tmp_path / "model.meta")


# --- TensorFlow's own files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "num_variables"), [("checkpoint", 57), ("saved_model", 20)])
def test_tensorflows_variables_are_read_to_the_bit(
    form: str, num_variables: int, real_data: Callable[[str], Path]
) -> None:
    folder = real_data("tf-wide-deep")
    expected = np.load(folder / "variables.npz")
    found = read_all(find(folder / form).prefix)
    assert len(found) == num_variables
    same(found, {name: expected[name.replace("/", "|")] for name in found})
