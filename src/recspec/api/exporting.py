"""Trained models exported, verified and imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recspec.api.data import opened
from recspec.api.progress import bar
from recspec.api.verb_checks import Place, verb
from recspec.api.views import Section, View, Viewed, figures
from recspec.base.errors import BundleError, require_extra

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, repr=False)
class Exported(Viewed):
    """An export: its folder, and the content of its `export.json`."""

    folder: Path
    description: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def __fspath__(self) -> str:
        return str(self.folder)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(self.description)

    def view(self) -> View:
        """Precision, differences and latency of the program."""
        sheet = self.description
        told = {"precision": f"{sheet['precision']}: {sheet['computed']}", "checked on": sheet["checked_on"]}
        told |= {f"{name} |dp|": f"{sheet['difference'][name]:.2g}" for name in ("mean", "largest")}
        told |= {"AUC": sheet["auc"], "bytes": sheet["size_bytes"], **sheet.get("triton", {})}
        latency = sheet["latency"]
        columns = tuple(latency[0]) if latency else ()
        lines = Section(f"latency, {sheet['threads']} threads", columns, [tuple(line.values()) for line in latency])
        return View(
            f"{self.folder}: {sheet['model']} as {sheet['format']}",
            [figures("", told), lines],
            remarks=[f"note: {note}" for note in self.notes],
        )


@verb
def export(
    run: Place,
    out: Place,
    *,
    format: Literal["onnx", "pt2", "triton"] = "onnx",
    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32",
    form: Literal["rows", "ranker"] = "rows",
    data: Place | None = None,
    tolerance: float | None = None,
    allow_drift: bool = False,
    name: str | None = None,
    triton_backend: Literal["onnxruntime", "python"] = "onnxruntime",
    batch_sizes: Sequence[int] = (1, 64, 512, 4096),
    threads: int | None = None,
    allow_outside: bool = False,
    verify: bool = True,
    progress: bool | Callable[[str], None] | None = None,
) -> Exported:
    """Export a model to ONNX, AOTInductor or Triton, and check it.

    Args:
        run: Folder of a run or a bundle.
        out: Folder to write; with triton, the model repository.
        format: Kind of program; pt2 is AOTInductor.
        precision: Precision of the program.
        form: Input: any rows, or one request with N candidates (ranker).
        data: Prepared dataset for checks; by default generated rows.
        tolerance: Largest allowed mean difference of probabilities; a single one may be 20 times that.
        allow_drift: Write the program even beyond the tolerance.
        name: Model name in the Triton repository.
        triton_backend: Triton's backend.
        batch_sizes: Batch sizes of the latency measurement.
        threads: Threads of the latency measurement.
        allow_outside: Allow files outside the specification's folder.
        verify: Compare files with their manifest.
        progress: A function that receives each stage, or False for no bar.

    Raises:
        ExportError: if the model can't be exported, or the program drifts beyond the tolerance.
        SettingsError: for an unknown format, precision or form.
        BundleError: if the run holds no bundle, or a damaged one.
    """
    from recspec.bundle import folder as bundle
    from recspec.export import ExportSettings
    from recspec.export import export as run_export

    chosen: dict[str, Any] = {"format": format, "precision": precision, "form": form, "triton_backend": triton_backend}
    settings = ExportSettings(
        **chosen,
        tolerance=tolerance,
        allow_drift=allow_drift,
        threads=threads,
        name=name,
        batch_sizes=tuple(batch_sizes),
    )
    if format != "pt2":
        for library in ("onnx", "onnxscript", "onnxruntime"):
            require_extra(library, "onnx")
    spec = opened(data, allow_outside=allow_outside).spec if data is not None else None
    trained = bundle.load(Path(run), verify=verify)
    with bar(False if callable(progress) else progress) as shown:

        def tell(stage: str) -> None:
            if callable(progress):
                progress(stage)
            elif shown is not None:
                shown.stage(stage, 0, None)

        made = run_export(trained, Path(out), settings, spec, tell=tell)
    whole = str(made.description.get("triton", {}).get("recommend", "none: take --format triton --form ranker"))
    of_ranker = f"of a pipeline the ranker alone is exported, without retrievers and filter; {whole[6:]}"
    drifts = "the program drifts beyond its tolerance; it was written all the same"
    notes = [
        note
        for note, holds in (
            (of_ranker, trained.pipeline is not None and whole.startswith("none: ")),
            (drifts, made.description["difference"]["drifts"]),
        )
        if holds
    ]
    return Exported(made.folder, made.description, tuple(notes))


class Digest(str):
    """The digest of a manifest; `folder` holds the files that it covers."""

    folder: Path


@verb
def verify(run: Place, *, expect: str | None = None) -> Digest:
    """Compare a model's files with its manifest.

    The result is the manifest's digest.

    Args:
        run: Folder of a run, a bundle or an export.
        expect: Digest that an earlier `recspec verify` printed.

    Raises:
        BundleError: naming every file that differs, or for another digest than expected.
    """
    from recspec.base.files import manifest
    from recspec.bundle import find_export
    from recspec.bundle import folder as bundle

    folder = find_export(Path(run)) or bundle.find(Path(run))
    digest = Digest(manifest.check(folder))
    digest.folder = folder
    if expect is not None and digest != expect.strip().lower():
        raise BundleError(f"{folder}: its manifest has the digest {digest}; expected {expect}")
    return digest


@dataclass(frozen=True, repr=False)
class Imported(Viewed):
    """A bundle made from a model of TensorFlow."""

    folder: Path
    summary: Mapping[str, object]
    notes: tuple[str, ...]

    def __fspath__(self) -> str:
        return str(self.folder)

    def view(self) -> View:
        """What the bundle was made from."""
        return View(
            f"imported into {self.folder}",
            [figures("", self.summary)],
            remarks=[f"note: {note}" for note in self.notes],
        )


@verb
def import_tf(model: Place, out: Place, *, columns: Place, force: bool = False) -> Imported:
    """Turn a Wide & Deep model of TensorFlow into a bundle.

    TensorFlow isn't needed.

    Args:
        model: Folder of a SavedModel or of checkpoints, or a checkpoint's prefix.
        out: Folder for the bundle.
        columns: JSON file that describes the feature columns.
        force: Replace an existing bundle.

    Raises:
        DataError: if a file is damaged, or with every variable and column that can't be mapped.
        BundleError: if `out` is taken, or can't be written.
    """
    from recspec.tf_import import import_tf as run

    made = run(Path(model), Path(out), Path(columns), force=force)
    return Imported(made.folder, made.summary, tuple(made.notes))
