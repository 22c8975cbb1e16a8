"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Data = Annotated[Path, Argument(help="Prepared dataset: its folder or its specification file.", metavar="DATA")]
Run = Annotated[Path, Argument(help="Folder of a run or a bundle.", metavar="RUN")]
Out = Annotated[Path, Argument(help="Folder to write.", metavar="OUT")]
Set = Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help="Set one setting; repeatable.")]
Workers = Annotated[int, Option(min=1, metavar="N", help="Processes that write shards, if --out is a folder.")]
Engine = Annotated[str, Option(help="Engine of the processes that write shards: local, spark or ray.")]
ShardSize = Annotated[int | None, Option(min=1, metavar="N", help="Users or rows of a shard; by default 16,384.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object to standard output.")]
Outside = Annotated[bool, Option("--allow-outside", help="Allow files outside the specification's folder.")]
Verify = Annotated[bool, Option("--verify/--no-verify", help="Check every file against its manifest.")]
Device = Annotated[str, Option(help="Device: auto, cpu, cuda or cuda:N.")]
