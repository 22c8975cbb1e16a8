"""Build the wheel and the source archive, and use the wheel in blank environments: bare, and with two of its extras.

The wheel is built from the source archive, so that both are tested. `make dist` leaves them in dist/.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CPU_TORCH = "https://download.pytorch.org/whl/cpu/"


def main() -> None:
    """Build and check; ends with an error at the first command that fails."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for extra, use in {"": use_bare, "baselines": use_baselines, "serve": use_server}.items():
            started = time.monotonic()
            place = Path(folder) / (extra or "bare")
            recspec = install(wheel, extra, place)
            installed = time.monotonic()
            use(recspec, place)
            name = f"{wheel.name}[{extra}]" if extra else wheel.name
            sys.stdout.write(
                f"{name}: installed in {installed - started:.0f} s, used in {time.monotonic() - installed:.0f} s\n"
            )
            shutil.rmtree(place)


def build(folder: Path) -> Path:
    """Build both into dist/; returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    python = blank(folder / "build")
    call(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", "hatchling")
    call(python, "-m", "hatchling", "build", "-t", "sdist", "-d", DIST)
    (archive,) = DIST.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    call(python, "-m", "hatchling", "build", "-t", "wheel", "-d", DIST, cwd=unpacked)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def blank(place: Path) -> Path:
    """The Python of a new environment."""
    venv.create(place, with_pip=True)
    return place / "bin" / "python"


def install(wheel: Path, extra: str, place: Path) -> Path:
    """Install the wheel with an extra in a new environment; returns its `recspec`. torch is the CPU build if found."""
    python = blank(place)
    index: list[str] = []
    try:
        with urllib.request.urlopen(f"{CPU_TORCH}torch/", timeout=5):
            index = ["--extra-index-url", CPU_TORCH]
    except OSError:
        pass
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    call(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *index, what)
    call(python, "-m", "pip", "check")
    return place / "bin" / "recspec"


def use_bare(recspec: Path, place: Path) -> None:
    """Prepare a table, find a published recipe, and train, evaluate and ask two models."""
    data = prepare(recspec, place)
    call(recspec.with_name("python"), "-c", "from recspec.base import config; config.load_recipe('neumf-ml-1m')")
    for model in ("ease", "neumf"):
        run = place / model
        more = ["--set", "train.epochs=1", "--set", "train.tensorboard=false"] if model == "neumf" else []
        call(recspec, "train", model, data, run, *more)
        call(recspec, "evaluate", run, data, "--baselines")
        call(recspec, "recommend", run, "--user", "u1", "-k", "3")


def use_baselines(recspec: Path, place: Path) -> None:
    """Fit the model that needs the extra to labelled rows."""
    rows = [f"u{row % 60},{row % 7},{int(row % 3 == 0)}" for row in range(1500)]
    (place / "clicks.csv").write_text("\n".join(["user,place,label", *rows]))
    call(recspec, "prepare", "table", place / "clicks.csv", place / "clicks", "--set", "label=label")
    call(recspec, "train", "lightgbm", place / "clicks", place / "lightgbm")


def use_server(recspec: Path, place: Path) -> None:
    """Serve a model and ask it."""
    call(recspec, "train", "popularity", prepare(recspec, place), place / "run")
    with subprocess.Popen(
        [recspec, "serve", place / "run", "--http-port", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            body = json.dumps({"user": "u1", "k": 3}).encode()
            asked = urllib.request.Request(f"{address}/recommend", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=30) as answer:
                assert json.load(answer)["items"]
        finally:
            server.terminate()


def prepare(recspec: Path, place: Path) -> Path:
    """A small prepared table of purchases."""
    draw = random.Random(0)
    rows = [f"u{draw.randrange(60)},i{draw.randrange(30)},{time}" for time in range(1500)]
    (place / "rows.csv").write_text("\n".join(["user,item,time", *rows]))
    columns = [word for name in ("user=user", "item=item", "timestamp=time") for word in ("--set", name)]
    call(recspec, "prepare", "table", place / "rows.csv", place / "data", *columns)
    return place / "data"


def call(*words: str | Path, cwd: Path | None = None) -> None:
    """Run a command; ends with what it said if it fails."""
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}")


if __name__ == "__main__":
    main()
