"""Print entries of requirements.lock, each with its hashes, for `pip install --no-deps --require-hashes`.

    python scripts/locked_requirements.py requirements.lock --report wanted.json
    python scripts/locked_requirements.py requirements.lock --only hatchling packaging

`wanted.json` is what `pip install --dry-run --report` writes. torch is left out: images take it from another index.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def main(words: Sequence[str] | None = None) -> None:
    """Print the entries."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("lock", type=Path)
    wanted = options.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--report", type=Path, help="packages of a report of pip; those that the lock lacks are passed")
    wanted.add_argument("--only", nargs="+", metavar="NAME", help="packages, each of which the lock must hold")
    given = options.parse_args(words)
    found = entries(given.lock, names_in(given.report) if given.report else given.only)
    held = {_name(each) for each in found}
    if missing := [name for name in given.only or () if _canonical(name) not in held]:
        raise SystemExit(f"{given.lock.name}: holds no '{missing[0]}'; add it to constraints.txt and run `make lock`")
    sys.stdout.write("\n".join([*found, ""]))


def names_in(report: Path) -> list[str]:
    """The packages that pip would install, without torch."""
    installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [each["metadata"]["name"] for each in installs if each["metadata"]["name"] != "torch"]


def entries(lock: Path, names: Iterable[str]) -> list[str]:
    """The lock's entries of these packages; a package that it lacks has none."""
    wanted = set(map(_canonical, names))
    held = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").rstrip())
    return [each for each in held if not each.startswith("#") and _name(each) in wanted]


def _name(entry: str) -> str:
    return _canonical(re.split(r"[=\s\[]", entry, maxsplit=1)[0])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
