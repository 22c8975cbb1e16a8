"""Commands about data: prepare, check, describe, synthesize, transcode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from recspec.base.errors import SettingsError, how_many
from recspec.cli.console import (
    Data,
    Json,
    Out,
    Outside,
    Set,
    err,
    out,
    print_figures,
    print_json,
    print_next,
    print_section,
    stages,
)
from recspec.cli.process import fresh_folder

if TYPE_CHECKING:
    from recspec.feature_spec import FeatureSpec


def prepare(
    dataset: Annotated[str, Argument(metavar="DATASET", help="Name from `recspec datasets`.")],
    raw: Annotated[Path, Argument(metavar="RAW", help="Raw files: a folder, a file or a zip.")],
    out_folder: Annotated[Path, Argument(metavar="OUT", help="Folder to write.")],
    settings: Set = None,
    engine: Annotated[str, Option(metavar="duckdb|spark", help="Query engine.")] = "duckdb",
    memory_limit: Annotated[str, Option(help="Memory limit of the process, such as 4GB.")] = "4GB",
    force: Annotated[bool, Option(help="Replace a dataset prepared with other settings.")] = False,
) -> None:
    """Turn raw files into a prepared dataset."""
    from recspec import api
    from recspec.base import config
    from recspec.data.prepare import Remark

    with stages() as show:

        def progress(stage: str, done: float, total: float | None) -> None:
            if isinstance(stage, Remark):
                err.print(stage)
            else:
                show(stage, done, total)

        made = api.prepare(
            raw,
            out_folder,
            dataset=dataset,
            settings=config.parse_assignments(settings or []),
            engine=engine,
            memory_limit=memory_limit,
            force=force,
            progress=progress,
        )
    err.print(made.message)
    print_prepared(made.prepared, made.spec)
    if "valid" in made.splits:
        print_next("auto", out_folder, fresh_folder(out_folder.parent, "auto"), "--minutes", 10)
    else:
        print_next("describe", out_folder)


def check(data: Data, allow_outside: Outside = False) -> None:
    """Validate a specification and its files."""
    from recspec import api

    data_set = api.open_data(data, allow_outside=allow_outside)
    rows = ", ".join(f"{split} {how_many(count, 'row')}" for split, count in data_set.check().items())
    out.print(f"ok: {how_many(len(data_set.spec.features), 'feature')}; {rows or 'no split'}")


HTML = Option("--html", metavar="OUT", help="HTML file to write instead, with distributions and suspected leaks.")


def describe(
    data: Data,
    html: Annotated[Path | None, HTML] = None,
    json_output: Json = False,
    allow_outside: Outside = False,
) -> None:
    """Summarise a dataset: rows, features, label rate, histories."""
    from recspec import api

    if html is not None and json_output:
        raise SettingsError("describe: --html and --json are two outputs; give one of them")
    described = api.describe(data, html=html, allow_outside=allow_outside)
    if html is not None:
        out.print(str(described.page), soft_wrap=True)
        return
    figures = described.to_dict()
    if json_output:
        print_json(figures)
        return
    for section, value in figures.items():
        print_section(section, value)


def synthesize(
    spec: Annotated[Path, Argument(metavar="SPEC", help="Specification of the data to generate.")],
    out_folder: Out,
    rows: Annotated[int, Option(min=1, help="Rows of train; other splits get a tenth.")] = 1000,
    to: Annotated[str, Option(help="Chunk type to write.")] = "parquet",
    distribution: Annotated[str, Option(metavar="uniform|power_law", help="Distribution of the ids.")] = "uniform",
    seed: Annotated[int, Option(help="Random seed.")] = 0,
) -> None:
    """Generate random data in the shape of a specification."""
    from recspec import api

    made = api.synthesize(spec, out_folder, rows=rows, to=to, distribution=distribution, seed=seed)
    out.print(f"{made.path}: {', '.join(made.splits)} written as {to}")


def transcode(
    data: Data,
    out_folder: Out,
    to: Annotated[str, Option(help="Chunk type to write.")] = "parquet",
    allow_outside: Outside = False,
) -> None:
    """Convert a dataset to another chunk type.

    It also resolves cardinalities of `auto`.
    """
    from recspec import api

    made = api.transcode(data, out_folder, to=to, allow_outside=allow_outside)
    out.print(f"{made.path}: {', '.join(made.splits)} written as {to}")


def print_prepared(summary: Mapping[str, object], spec: FeatureSpec) -> None:
    """What a preparation counted, then what it inferred, dropped and changed, a line each."""
    from recspec.base.summaries import NOTES, shown_counts

    notes = {name: summary[name] for name in NOTES if name in summary}
    print_figures("prepared", shown_counts(summary, spec.metadata))
    for name, sentences in notes.items():
        out.print(name, style="bold")
        for sentence in sentences if isinstance(sentences, list) else [sentences]:
            out.print(f"  - {sentence}", soft_wrap=True)
