"""Base and delta give the new bundle bit for bit; damaged and hostile deltas are refused, and change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.base.errors import BundleError, RecspecError
from recspec.base.files import manifest
from recspec.bundle import delta, versions
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import read_tensors, write_tensors


def folder_of(path: Path, tables: dict[str, torch.Tensor], **files: str) -> Path:
    """A bundle as far as a delta goes: tensors and other files, with their manifest."""
    path.mkdir(parents=True)
    write_tensors(path / "weights.safetensors", tables, {"format": 1, "epoch": len(tables)})
    for name, text in {"bundle.json": "{}", **files}.items():
        (path / name.replace("__", "/")).parent.mkdir(exist_ok=True)
        (path / name.replace("__", "/")).write_text(text)
    manifest.write(path)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    table = torch.randn(100, 8)
    grown = torch.cat([table, torch.randn(3, 8)])
    grown[7] += 1
    both = {"same": torch.arange(5), "scalar": torch.tensor(2.0), "flags": torch.tensor([True, False])}
    base = folder_of(tmp_path / "base", {"table": table, **both, "gone": torch.ones(2)}, kept="a", other="b", old="c")
    tensors = {"table": grown, **both, "wide": torch.zeros(3, 2)}
    return base, folder_of(tmp_path / "new", tensors, kept="a", other="B", more__x="new")


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_base_and_delta_give_the_new_bundle_bit_for_bit(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    base, new = pair
    size = delta.write(base, new, tmp_path / "delta.safetensors")
    (tmp_path / "out").mkdir()
    delta.apply(base, tmp_path / "delta.safetensors", tmp_path / "out")
    assert content(tmp_path / "out") == content(new)
    assert size == (tmp_path / "delta.safetensors").stat().st_size


def test_only_changed_and_new_rows_are_in_a_delta(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    base, new = pair
    delta.write(base, new, tmp_path / "d.safetensors")
    tensors, header = read_tensors(tmp_path / "d.safetensors")
    assert tensors["places/weights.safetensors/table"].tolist() == [7, 100, 101, 102]
    assert tensors["rows/weights.safetensors/table"].shape == (4, 8)
    files = header["files"]
    assert isinstance(files, dict)
    assert files["kept"] == "same"
    assert files["other"] == "whole"
    assert files["weights.safetensors"]["tensors"]["same"] == "same"
    assert (header["base"], header["result"]) == (manifest.digest(base), manifest.digest(new))


def test_a_number_that_is_none_and_a_negative_zero_are_kept(tmp_path: Path) -> None:
    before, after = torch.zeros(50, 8), torch.zeros(50, 8)
    after[1, 0], after[2, 1] = float("nan"), -0.0
    base, new = folder_of(tmp_path / "a", {"t": before}), folder_of(tmp_path / "b", {"t": after})
    delta.write(base, new, tmp_path / "d.safetensors")
    assert read_tensors(tmp_path / "d.safetensors")[0]["places/weights.safetensors/t"].tolist() == [1, 2]


def test_a_delta_of_another_bundle_is_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    base, new = pair
    delta.write(base, new, tmp_path / "d.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=r"is not a delta of .*; apply the deltas in order, or copy the whole run"):
        delta.apply(new, tmp_path / "d.safetensors", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, h: h.update(format=2), "delta format 2; this recspec reads 1"),
        (lambda _, h: h.update(files=["x"]), "its header names no files"),
        *(
            (lambda _, h, name=name: h["files"].update({name: "same"}), "which no manifest covers; a delta holds")
            for name in (
                "../evil",
                "/tmp/evil",
                "export/model.onnx",
                "run.json",
                "report.html",
                "evaluations/a.json",
                "manifest.json",
                ".hidden",
                "below/.hidden/x",
                "a/../export/model.onnx",
                "./export/x",
                "a//x",
            )
        ),
        (lambda _, h: h["files"].update({"evil": "whole"}), "damaged: .*whole/evil"),
        (lambda _, h: h["files"].update(kept=7), "neither same, whole nor tensors"),
        (lambda _, h: h["files"].pop("other"), "its files are not as they were written"),
        (lambda t, _: t.update({"whole/other": torch.zeros(3)}), "not bytes"),
        (lambda t, _: t["places/weights.safetensors/table"].fill_(-1), "places from -1 to -1; expected 0 to 102"),
        (lambda t, _: t["places/weights.safetensors/table"].fill_(103), "places from 103 to 103; expected 0 to 102"),
        (lambda t, _: t.update({"places/weights.safetensors/table": torch.zeros(4)}), "do not fit together"),
        (lambda t, _: t.update({"rows/weights.safetensors/table": torch.zeros(4, 8, dtype=torch.int64)}), "rows of"),
        (lambda _, h: h["files"]["weights.safetensors"]["tensors"]["table"].update(rows=1 << 60), "a number of rows"),
        (lambda _, h: h["files"]["weights.safetensors"]["tensors"]["table"].update(rows=True), "a number of rows"),
        (lambda t, _: t["rows/weights.safetensors/table"].fill_(0), "its files are not as they were written"),
        (lambda t, _: t.update(manifest=torch.zeros(2, dtype=torch.uint8)), "manifest.json"),
    ],
)
def test_a_forged_delta_under_a_right_digest_is_refused(
    tmp_path: Path, pair: tuple[Path, Path], change: object, message: str
) -> None:
    base, new = pair
    delta.write(base, new, tmp_path / "d.safetensors")
    tensors, header = read_tensors(tmp_path / "d.safetensors")
    change(tensors, header)  # type: ignore[operator]
    write_tensors(tmp_path / "d.safetensors", tensors, header)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=message):
        delta.apply(base, tmp_path / "d.safetensors", tmp_path / "out")
    assert {each.name for each in tmp_path.iterdir()} == {"base", "new", "out", "d.safetensors"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_delta_with_any_changed_bytes_gives_an_error_or_the_same_bundle(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    base = folder_of(folder / "base", {"t": torch.arange(12.0).reshape(6, 2)}, kept="a")
    new = folder_of(folder / "new", {"t": torch.arange(14.0).reshape(7, 2)}, kept="b")
    delta.write(base, new, folder / "d.safetensors")
    whole = bytearray((folder / "d.safetensors").read_bytes())
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / "d.safetensors").write_bytes(whole)
    (folder / "out").mkdir()
    try:
        delta.apply(base, folder / "d.safetensors", folder / "out")
    except RecspecError:
        return
    assert content(folder / "out") == content(new)


# --- versions --------------------------------------------------------------------------------------------------------


def run_of(folder: Path, updates: int) -> Path:
    """A run with a chain of updates."""
    base = folder_of(folder / "run" / "bundle", {"t": torch.arange(12.0).reshape(6, 2)})
    for number in range(1, updates + 1):
        update = folder / "run" / "updates" / f"{number:04d}"
        table = torch.arange(12.0 + 2 * number).reshape(-1, 2) * number
        new = folder_of(update / "bundle", {"t": table})
        delta.write(base, new, update / versions.DELTA)
        base = new
    return folder / "run"


def test_a_run_is_its_newest_complete_version(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    assert bundle.find(run) == run / "updates" / "0002" / "bundle"
    assert bundle.find(run / "bundle") == run / "bundle"
    assert bundle.find(run / "updates" / "0001") == run / "updates" / "0001" / "bundle"
    (run / "updates" / "0002" / versions.DELTA).unlink()  # as an update that was killed leaves it
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert versions.next_update(run) == run / "updates" / "0002"
    assert not (run / "updates" / "0002").exists()


def test_deltas_chain_from_a_copy_of_the_base(tmp_path: Path) -> None:
    run, copy = run_of(tmp_path, 3), tmp_path / "copy"
    shutil.copytree(run / "bundle", copy / "bundle")
    for number in ("0001", "0002", "0003"):
        (copy / "updates" / number).mkdir(parents=True)
        shutil.copyfile(run / "updates" / number / versions.DELTA, copy / "updates" / number / versions.DELTA)
    assert versions.take_deltas(copy) == 3
    for number in ("0001", "0002", "0003"):
        assert content(copy / "updates" / number / "bundle") == content(run / "updates" / number / "bundle")
    assert versions.take_deltas(copy) == 0


def test_a_delta_without_the_one_before_it_leaves_the_versions_as_they_are(tmp_path: Path) -> None:
    run, copy = run_of(tmp_path, 2), tmp_path / "copy"
    shutil.copytree(run / "bundle", copy / "bundle")
    (copy / "updates" / "0002").mkdir(parents=True)
    shutil.copyfile(run / "updates" / "0002" / versions.DELTA, copy / "updates" / "0002" / versions.DELTA)
    with pytest.raises(BundleError, match="is not a delta of"):
        versions.take_deltas(copy)
    assert bundle.find(copy) == copy / "bundle"
    assert [each.name for each in (copy / "updates" / "0002").iterdir()] == [versions.DELTA]


def test_links_that_lead_elsewhere_are_no_updates(tmp_path: Path) -> None:
    run, other = run_of(tmp_path, 1), run_of(tmp_path / "other", 1)
    (run / "updates" / "0002").symlink_to(other / "updates" / "0001")
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert json.loads((run / "updates" / "0001" / "bundle" / "manifest.json").read_text())["format"] == 1
