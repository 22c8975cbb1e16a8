"""Commands that verify, import or export a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from recspec.base.machine import keep_freed_memory
from recspec.cli.console import (
    Json,
    Outside,
    Run,
    Verify,
    err,
    out,
    print_figures,
    print_json,
    print_lines,
    print_next,
    print_next_program,
)
from recspec.cli.process import sizes


def verify(
    run: Annotated[Path, Argument(help="Folder of a run, a bundle or an export.", metavar="RUN")],
    expect: Annotated[
        str | None, Option(metavar="DIGEST", help="Digest that an earlier `recspec verify` printed.")
    ] = None,
) -> None:
    """Compare a model's files with its manifest.

    It prints the manifest's digest.
    """
    from recspec import api

    digest, folder = api.verify_at(run, expect=expect)
    out.print(f"{digest}  {folder}")


def import_tf(
    model: Annotated[
        Path,
        Argument(metavar="MODEL", help="Folder of a SavedModel or of checkpoints, or a checkpoint's prefix."),
    ],
    out_folder: Annotated[Path, Argument(metavar="OUT", help="Folder for the bundle.")],
    columns: Annotated[Path, Option(metavar="FILE", help="JSON file that describes the feature columns.")],
    force: Annotated[bool, Option("--force", help="Replace an existing bundle.")] = False,
) -> None:
    """Turn a Wide & Deep model of TensorFlow into a bundle."""
    from recspec import api

    imported = api.import_tf(model, out_folder, columns=columns, force=force)
    for note in imported.notes:
        err.print(f"note: {note}")
    print_figures(f"imported into {imported.folder}", imported.summary)


def export(
    run: Run,
    out_folder: Annotated[Path, Argument(metavar="OUT", help="Folder to write; with triton, the model repository.")],
    format_: Annotated[str, Option("--format", metavar="onnx|pt2|triton", help="Kind of program.")] = "onnx",
    precision: Annotated[str, Option(metavar="fp32|bf16|fp16|int8", help="Precision of the program.")] = "fp32",
    form: Annotated[
        str,
        Option(metavar="rows|ranker", help="Input: any rows, or one request with N candidates (ranker)."),
    ] = "rows",
    data: Annotated[Path | None, Option(help="Prepared dataset for checks; by default generated rows.")] = None,
    tolerance: Annotated[float | None, Option(help="Largest allowed mean difference of probabilities.")] = None,
    allow_drift: Annotated[bool, Option(help="Write the program even beyond the tolerance.")] = False,
    name: Annotated[str | None, Option(help="Model name in the Triton repository.")] = None,
    triton_backend: Annotated[
        str,
        Option(metavar="onnxruntime|python", help="Triton's backend."),
    ] = "onnxruntime",
    batch_sizes: Annotated[
        str, Option(metavar="A,B", help="Batch sizes of the latency measurement.")
    ] = "1,64,512,4096",
    threads: Annotated[int | None, Option(min=1, help="Threads of the latency measurement.")] = None,
    json_output: Json = False,
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """Export a model to ONNX, AOTInductor or Triton, and check it."""
    from recspec import api

    keep_freed_memory()
    made = api.export(
        run,
        out_folder,
        format=format_,
        precision=precision,
        form=form,
        data=data,
        tolerance=tolerance,
        allow_drift=allow_drift,
        name=name,
        triton_backend=triton_backend,
        batch_sizes=sizes("--batch-sizes", batch_sizes),
        threads=threads,
        allow_outside=allow_outside,
        verify=verify,
        progress=lambda stage: err.print(f"{stage} ..."),
    )
    if json_output:
        print_json(made.description)
    else:
        _print_sheet(made.folder, made.description)
    for note in made.notes:
        err.print(f"note: {note}")
    _print_next(run, out_folder, made.description)


def _print_next(run: Path, folder: Path, sheet: Mapping[str, Any]) -> None:
    """A command that takes the export; `recspec serve` takes neither a ranker nor a Triton repository."""
    if triton := sheet.get("triton"):
        made = (triton.get("recommend", ""), triton["raw"] or "", triton["model"])
        model = next(name for name in made if name and not name.startswith("none: "))
        options = (f"--model-repository={folder}", "--model-control-mode=explicit", f"--load-model={model}")
        print_next_program("tritonserver", *options)
    elif sheet["signature"]["form"] == "ranker":
        print_next("bench", "infer", run, folder, "--form", "ranker")
    else:
        print_next("serve", folder)


def _print_sheet(folder: Path, sheet: Mapping[str, Any]) -> None:
    figures = {"precision": f"{sheet['precision']}: {sheet['computed']}", "checked on": sheet["checked_on"]}
    figures |= {f"{name} |dp|": f"{sheet['difference'][name]:.2g}" for name in ("mean", "largest")}
    figures |= {"AUC": sheet["auc"], "bytes": sheet["size_bytes"], **sheet.get("triton", {})}
    print_figures(f"{folder}: {sheet['model']} as {sheet['format']}", figures)
    print_lines(f"latency, {sheet['threads']} threads", sheet["latency"])
