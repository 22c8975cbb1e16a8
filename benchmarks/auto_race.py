"""`recspec auto` of two versions: is the winner as good in a quarter of the time?

    python benchmarks/auto_race.py WORK --before SRC --after SRC --minutes 30 [--share 0.25] DATA ...

SRC is a folder that holds the package `recspec`. Each prepared dataset is searched by the version before with all
minutes, and by the version after with the share of them. Minutes are of the processor, so a busy machine counts for
nothing. The winners are compared on the users or rows of valid, and as trained at the end on test. A search that is
there is not repeated. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

PROCESSOR_MINUTES = """
import sys, time
time.monotonic = time.perf_counter = time.process_time
from recspec.cli.app import app
app()
"""


def search(source: Path, data: Path, out: Path, minutes: float) -> dict[str, object]:
    """The leaderboard of a search."""
    if not (out / "leaderboard.json").exists():
        words = [sys.executable, "-c", PROCESSOR_MINUTES, "auto", str(data), str(out), "--minutes", str(minutes)]
        subprocess.run(words, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(source.resolve())})
    found: dict[str, object] = json.loads((out / "leaderboard.json").read_text())
    return found


def lead(data: Path, metric: str, split: str, *runs: Path) -> tuple[float, float]:
    """The lead of the second run over the first, and its standard error."""
    from recspec.bundle import folder as bundle
    from recspec.feature_spec import FeatureSpec
    from recspec.training.search.state import judge, question_of

    question = question_of(FeatureSpec.load(data), split, metric)
    first, second = (judge(bundle.load(run).model.eval(), question, metric) for run in runs)
    return second.lead(first)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("work", type=Path)
    asked.add_argument("data", type=Path, nargs="+")
    asked.add_argument("--before", type=Path, required=True)
    asked.add_argument("--after", type=Path, required=True)
    asked.add_argument("--minutes", type=float, default=30.0)
    asked.add_argument("--share", type=float, default=0.25)
    given = asked.parse_args()
    for data in given.data:
        outs, boards = [], []
        for name, source, share in (("before", given.before, 1.0), ("after", given.after, given.share)):
            outs.append(given.work / name / data.name)
            boards.append(search(source, data, outs[-1], share * given.minutes))
        lines = [board["lines"][0] for board in boards]  # type: ignore[index]
        metric = str(boards[0]["metric"])
        runs = [out / "runs" / str(line["name"]) for out, line in zip(outs, lines, strict=True)]
        told = {
            "data": data.name,
            "winners": [line["name"] for line in lines],
            "valid": [line["valid"] for line in lines],
            "lead on valid": lead(data, metric, "valid", *runs),
            "lead on test": lead(data, metric, "test", *(out / "best" for out in outs)),
            "seconds": [board["seconds"] for board in boards],
            "seconds of losers": [board["seconds_of_losers"] for board in boards],
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
