"""Training speed of every model beside its peers, and where each step's time goes: one table, one JSON.

    python benchmarks/training.py [--models neumf dlrm] [--quick] [--threads 1] [--rounds 3] [--seconds 10]

Runs the benchmarks `*_vs_peers.py` one after the other, each with the sizes and batches that it documents; every
contender in turns, in a process of its own, medians over the rounds. Peers have environments of their own, which are
made where there are none; a peer that can't be installed or run is a line with its reason.

`times each peer` is recspec's speed over a peer's, where both do the same: a peer that has no auxiliary loss stands
beside recspec without one.

For recspec the table gives, as measured in the same processes (`recspec.bench.measure_limits`):

- `of matrix rate`: floating-point operations of all matrix products of a step, over the step's time, over what square
  products of the same precision reach;
- `of bandwidth`: the bytes that a step has to read or write (weights, gradients and optimizer state touched, rows of
  tables, activations kept for the backward pass; to the letter: `recspec.bench.profiling.Work`), over the
  step's time, over what a triad a <- b + 3 c of vectors larger than the caches moves. What the caches keep is not
  moved, so a step whose activations fit in them may pass 1;
- `peak memory` of the process that trains;
- the profile of a step: by part (loader, forward, backward, optimizer), and by what the operations do.

`--quick` takes two rounds of two seconds and leaves out contenders that only vary another: minutes
instead of most of an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import dcnv2_vs_peers
import dlrm_vs_peers
import neumf_vs_peers
import sasrec_vs_peers
import sequence_vs_peers
import wide_deep_vs_peers
from _side_by_side import Found, add_pace, environments, settled, where_and_when, write

SEQUENCES = ("--histories", "power_law", "--passes", "0", "--models")
PARTS: Mapping[str, tuple[ModuleType, Sequence[str]]] = {
    "neumf": (neumf_vs_peers, ()),
    "wide_deep": (wide_deep_vs_peers, ()),
    "dlrm": (dlrm_vs_peers, ()),
    "dcnv2": (dcnv2_vs_peers, ()),
    **{model: (sequence_vs_peers, (*SEQUENCES, model)) for model in ("din", "dien", "sim")},
    "sasrec": (sasrec_vs_peers, ()),
}
"""Each model's benchmark, and what it is told beside the pace."""

GROUPS = ("matrix products", "rows of tables", "elementwise", "copies", "loader", "optimizer", "Python and dispatch")


def main() -> int:
    """All parts, the table, the JSON; gives 1 where a part failed."""
    arguments = settled(_options().parse_args())
    report: Found = {
        "what": "training of every model: samples/s, beside peers, beside the machine's limits, and its profile",
        **{name: getattr(arguments, name) for name in ("threads", "rounds", "seconds", "warm_up", "quick")},
        "table": [],
        "failed": {},
        "parts": {},
        **where_and_when(),
    }
    for model in arguments.models:
        part, told = PARTS[model]
        try:
            found = _part(part, told, arguments)
        except subprocess.CalledProcessError as error:
            report["failed"][model] = (error.stderr or str(error)).strip().splitlines()[-1]
            continue
        for title, table in found["settings"].items():
            report["table"].append({"setting": title, **_row(table)})
        report["parts"][model] = found
        write(report, arguments.out)  # a run that is stopped keeps what it has
    _print(report)
    return 1 if report["failed"] else 0


def _part(part: ModuleType, told: Sequence[str], arguments: argparse.Namespace) -> Found:
    """A benchmark's report, with its tables printed."""
    pace = ["--rounds", arguments.rounds, "--seconds", arguments.seconds, "--warm-up", arguments.warm_up]
    pace += ["--threads", arguments.threads, "--environments", arguments.environments]
    given = [*told, *map(str, pace), *(["--quick"] if arguments.quick else [])]
    with tempfile.TemporaryDirectory() as scratch:
        own = settled(part.options().parse_args(given))
        found: Found = part.compare(own, Path(scratch))
    print(flush=True)
    return {**found, "batch_size": own.batch_size}


def _row(table: Found) -> dict[str, Any]:
    """A model's line: recspec's speed and shares, its ratio over each peer, and the profile of its step."""
    ours, first = table["results"]["recspec"], table["runs"]["recspec"][0]
    limits = (
        "gflop_per_step",
        "matrix_rate_gflops_per_second",
        "megabytes_per_step",
        "memory_bandwidth_gigabytes_per_second",
    )
    return {
        "model": table["model"],
        **ours,
        "over_peers": table["over_equals"],
        "least_ratio": min(table["over_equals"].values(), default=None),
        "not_measured": table["not_measured"],
        **{name: first[name] for name in limits},
        "profile": first.pop("profile"),
    }


# --- printing --------------------------------------------------------------------------------------------------------


def _print(report: Found) -> None:
    _print_speeds(report["table"])
    _print_profiles(report["table"])
    for model, why in report["failed"].items():
        print(f"{model}: failed; {why}")


def _print_speeds(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'':26}{'samples/s':>12}{'of matrix rate':>16}{'of bandwidth':>14}{'peak memory':>13}  times each peer")
    for row in rows:
        peers = ", ".join(f"{ratio:.2f} {peer}" for peer, ratio in sorted(row["over_peers"].items(), key=itemgetter(1)))
        missing = "".join(f"; {name}: {why}" for name, why in row["not_measured"].items())
        print(
            f"{_name(row):26}{row['samples_per_second']:12,}{row['share_of_matrix_rate']:16.3f}"
            f"{row['share_of_memory_bandwidth']:14.3f}{row['peak_memory_bytes'] / 1e9:10.2f} GB  {peers}{missing}"
        )


def _print_profiles(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{'share of a step':26}{'forward':>9}{'backward':>10}" + "".join(f"{group:>21}" for group in GROUPS))
    for row in rows:
        parts, groups = (
            {line["what"]: line["share"] for line in row["profile"][table]} for table in ("parts", "operations")
        )
        print(
            f"{_name(row):26}{parts['forward']:9.0%}{parts['backward']:10.0%}"
            + "".join(f"{groups.get(group, 0):21.0%}" for group in GROUPS)
        )


def _name(row: Mapping[str, Any]) -> str:
    setting = str(row["setting"])
    return setting if setting.startswith(row["model"]) else f"{row['model']}, {setting}"


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--models", nargs="+", choices=[*PARTS], default=[*PARTS])
    options.add_argument("--threads", type=int, default=1, help="of everybody")
    add_pace(options)
    options.add_argument("--environments", type=Path, default=environments(), help="the folder of peers' environments")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training.json")
    return options


if __name__ == "__main__":
    sys.exit(main())
