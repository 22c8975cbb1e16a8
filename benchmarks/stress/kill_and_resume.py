"""What a long run survives: killed at random moments, a damaged checkpoint, a full disk.

A real `recspec train` on made-up data is the measure, for each model: one run that is never stopped, and runs that are
killed with `kill -9` at random moments (the first half of them while a checkpoint is being written) and continued with
--resume; their final weights are compared byte for byte. Then its newest checkpoint is cut off, and one byte of it
changed, at random places: each time the one before it must be taken, with a message. At last a run meets a full disk.

    python benchmarks/stress/kill_and_resume.py [--models neumf dlrm] [--kills 10] [--damages 200]

What the report knows of models that are not measured stays in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recspec.base.errors import CheckpointError
from recspec.bundle import checkpoint

Found = dict[str, Any]

DATA: dict[str, dict[str, Any]] = {
    "neumf": {"kind": "interactions", "num_users": 2000, "num_items": 1000, "num_rows": 60_000, "num_negatives": 20},
    "dlrm": {"kind": "clicks", "num_users": 3000, "num_items": 2000, "num_rows": 60_000},
    "sim": {"kind": "interactions", "num_users": 1000, "num_items": 800, "num_rows": 24_000, "history": 20},
}
TRAINING: dict[str, dict[str, Any]] = {
    "neumf": {"factors": 8, "layers": [32, 16, 8], "train.batch_size": 16_384},
    "dlrm": {"embedding_dim": 16, "bottom": [32, 16], "top": [64, 32], "train.batch_size": 4096},
    "sim": {"embedding_dim": 8, "short_length": 5, "train.batch_size": 8192},
}
SHARED = {
    "train.epochs": 4,
    "train.checkpoint_minutes": 0,  # after every step: a kill often meets one that is being written
    "train.keep_checkpoints": 3,
    "train.log_every": 5,
    "train.tensorboard": False,
    "train.threads": 2,  # a number that is measured may differ from run to run, and with it the last digits
}
PATIENCE = 600.0  # seconds for one run


def main() -> None:
    """All three, of each model, and the report."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _side_by_side import where_and_when, write

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--damages", type=int, default=200, help="places at which a checkpoint is cut off, and changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "kill_and_resume.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            known[model] = {**_report(model, arguments, Path(scratch)), **where_and_when()}
        write(known, arguments.out)
    if not all(known[model]["all as promised"] for model in arguments.models):
        sys.exit(1)


def _report(model: str, arguments: argparse.Namespace, scratch: Path) -> Found:
    draw = random.Random(arguments.seed)
    data = _made(model, scratch)
    whole = scratch / "whole"
    started = time.monotonic()
    _finish(_command(model, data, whole))
    seconds = time.monotonic() - started
    expected = _weights(whole)
    print(f"{model}, never stopped: {seconds:.1f} s, {_steps(whole)} steps, weights {expected[:12]}")
    runs = []
    for turn in range(arguments.kills):
        runs.append(_killed(model, data, scratch / f"run-{turn}", draw, writing=turn < arguments.kills // 2))
        runs[-1]["equal"] = runs[-1].pop("weights") == expected
        print(f"kill {turn + 1}: {runs[-1]}")
    damages = {kind: _damaged(whole / "checkpoints", change, arguments.damages, draw) for kind, change in DAMAGES}
    for kind, found in damages.items():
        print(f"{kind}: {found}")
    full = _full_disk(model, data, scratch / "full", expected)
    print(f"full disk: {full}")
    return {
        "settings": {**TRAINING[model], **SHARED},
        "seed": arguments.seed,
        "steps": _steps(whole),
        "seconds": round(seconds, 1),
        "kills": runs,
        "equal_final_weights": sum(run["equal"] for run in runs),
        "damaged": damages,
        "full_disk": full,
        "all as promised": all(run["equal"] for run in runs)
        and all(found["detected"] == found["places"] == found["previous_used"] for found in damages.values())
        and full["equal_after_room_was_made"],
    }


# --- runs ------------------------------------------------------------------------------------------------------------


def _made(model: str, scratch: Path) -> Path:
    chosen = [part for name, value in DATA[model].items() for part in ("--set", f"{name}={value}")]
    _finish([sys.executable, "-m", "recspec", "prepare", "synthetic", str(scratch), str(scratch / "data"), *chosen])
    return scratch / "data"


def _command(model: str, data: Path, run: Path) -> list[str]:
    settings: dict[str, Any] = {**TRAINING[model], **SHARED}
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    return [sys.executable, "-m", "recspec", "train", model, str(data), str(run), *chosen]


def _finish(command: Sequence[str]) -> str:
    """Run to the end; what it said on standard error."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
    return done.stderr


def _weights(run: Path) -> str:
    return hashlib.sha256((run / "bundle" / "weights.safetensors").read_bytes()).hexdigest()


def _steps(run: Path) -> int:
    return checkpoint.newest(run / "checkpoints") or 0


# --- killed ----------------------------------------------------------------------------------------------------------


def _killed(model: str, data: Path, run: Path, draw: random.Random, *, writing: bool) -> Found:
    """A run that is killed at a random step, or in the middle of writing the checkpoint that follows, and continued."""
    command = _command(model, data, run)
    while True:
        at = draw.randrange(1, 40)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        half_written = _kill(process, run / "checkpoints", at, draw, writing=writing)
        if process.wait() == -signal.SIGKILL and _steps(run):
            break
        shutil.rmtree(run, ignore_errors=True)  # it had ended, or had no checkpoint yet
    step = _steps(run)
    said = _finish([*command, "--resume"])
    assert f"continuing from step {step}" in said, said
    return {"killed_after_step": step, "while_writing": half_written, "weights": _weights(run)}


def _kill(process: subprocess.Popen[bytes], folder: Path, at: int, draw: random.Random, *, writing: bool) -> bool:
    """Kill it once step `at` is saved; whether a checkpoint was half written then."""
    while process.poll() is None and (checkpoint.newest(folder) or 0) < at:
        time.sleep(0.001)
    if writing:
        while process.poll() is None and not _half_written(folder):
            pass
    else:
        time.sleep(draw.random() * 0.2)
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return _half_written(folder)


def _half_written(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(".step-*.tmp"))


# --- damaged ---------------------------------------------------------------------------------------------------------


def _cut_off(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def _changed(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ draw.randrange(1, 256)]) + data[place + 1 :]


def _changed_header(data: bytes, draw: random.Random) -> bytes:
    header = 8 + int.from_bytes(data[:8], "little")
    return _changed(data[:header], draw) + data[header:]


DAMAGES: tuple[tuple[str, Callable[[bytes, random.Random], bytes]], ...] = (
    ("cut off", _cut_off),
    ("one byte changed", _changed),
    ("one byte of the header changed", _changed_header),
)


def _damaged(folder: Path, damage: Callable[[bytes, random.Random], bytes], places: int, draw: random.Random) -> Found:
    """How often a damaged checkpoint is noticed, and the one before it taken."""
    newest, before = sorted(folder.glob(checkpoint.PATTERN), reverse=True)[:2]
    data = newest.read_bytes()
    found: Found = {"places": places, "file_bytes": len(data), "detected": 0, "previous_used": 0, "message": ""}
    for _ in range(places):
        newest.write_bytes(damage(data, draw))
        with suppress(CheckpointError):
            saved, notes = checkpoint.load_latest(folder)
            found["detected"] += len(notes) == 1
            found["previous_used"] += saved.path == before
            found["message"] = notes[0].replace(str(folder), "RUN/checkpoints") if notes else found["message"]
    newest.write_bytes(data)
    return found


# --- full ------------------------------------------------------------------------------------------------------------


def _full_disk(model: str, data: Path, run: Path, expected: str) -> Found:
    """A run whose disk is full at its third checkpoint: one message, the older ones stay, and it goes on with room.

    A small tmpfs is the disk where this process may mount one; else a limit on the size of files plays it.
    """
    command = _command(model, data, run)
    whole = run.with_name("whole") / "checkpoints"
    size = max(path.stat().st_size for path in whole.glob(checkpoint.PATTERN))
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(2.5 * size)}", "tmpfs", str(run)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        if is_mounted:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        else:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, preexec_fn=_small_files)
        kept = [path.name for path in sorted((run / "checkpoints").glob(checkpoint.PATTERN))]
        error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        for path in (run / "checkpoints").glob(checkpoint.PATTERN):
            checkpoint.load(path)
        with_room = shutil.copytree(run, run.with_name("with-room"))
    finally:
        if is_mounted:
            subprocess.run(["umount", str(run)], check=True)
    _finish([*_command(model, data, with_room), *(["--resume"] if kept else [])])
    return {
        "disk": f"tmpfs of {int(2.5 * size):,} bytes" if is_mounted else "files of 64 kB at most",
        "exit_status": done.returncode,
        "messages": len(error),
        "message": error[0].replace(str(run), "RUN") if error else done.stderr[-2000:],
        "traceback": "Traceback" in done.stderr,
        "checkpoints_kept": kept,
        "equal_after_room_was_made": _weights(with_room) == expected,
    }


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))


if __name__ == "__main__":
    main()
