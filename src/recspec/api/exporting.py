"""Trained models exported, verified and imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.api.data import load_spec
from recspec.api.progress import bar
from recspec.api.verbs import Place, verb
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

    def _view(self) -> View:
        sheet = self.description
        told = {"precision": f"{sheet['precision']}: {sheet['computed']}", "checked on": sheet["checked_on"]}
        told |= {f"{name} |dp|": f"{sheet['difference'][name]:.2g}" for name in ("mean", "largest")}
        told |= {"AUC": sheet["auc"], "bytes": sheet["size_bytes"], **sheet.get("triton", {})}
        latency = sheet["latency"]
        columns = tuple(latency[0]) if latency else ()
        lines = Section(f"latency, {sheet['threads']} threads", columns, [tuple(line.values()) for line in latency])
        return View(f"{self.folder}: {sheet['model']} as {sheet['format']}", [figures("", told), lines], self.notes)


@verb
def export(
    run: Place,
    out: Place,
    *,
    format: str = "onnx",
    precision: str = "fp32",
    form: str = "rows",
    data: Place | None = None,
    tolerance: float | None = None,
    allow_drift: bool = False,
    name: str | None = None,
    triton_backend: str = "onnxruntime",
    batch_sizes: Sequence[int] = (1, 64, 512, 4096),
    threads: int | None = None,
    allow_outside: bool = False,
    verify: bool = True,
    progress: bool | Callable[[str], None] | None = None,
) -> Exported:
    """Export a trained model and check it against the bundle.

    Args:
        run: A model, or the folder of a run or bundle.
        out: Folder to write; with triton, the model repository.
        format: Kind of program: onnx, pt2 (AOTInductor) or triton.
        precision: Precision of weights and matrix products: fp32, bf16, fp16 or int8.
        form: Input: rows (any rows) or ranker (one request with N candidates).
        data: Prepared dataset for checking the program; by default generated rows.
        tolerance: Allowed mean difference of probabilities; the largest may be 20 times that.
        allow_drift: Write the program even if it drifts beyond the tolerance.
        name: Model name in the Triton repository.
        triton_backend: Triton's backend, onnxruntime or python.
        batch_sizes: Batch sizes of the latency measurement, in rows.
        threads: Threads of the latency measurement.
        allow_outside: Allow files outside the specification's folder.
        verify: Check every file against its manifest.
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
    spec = load_spec(data, allow_outside=allow_outside) if data is not None else None
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


@verb
def verify(run: Place, *, expect: str | None = None) -> str:
    """Compare every file of a run, a bundle or an export with its manifest; returns the manifest's digest.

    Args:
        expect: Digest that the manifest must have.

    Raises:
        BundleError: naming every file that differs, or for another digest than expected.
    """
    return verify_at(run, expect=expect)[0]


def verify_at(run: Place, *, expect: str | None = None) -> tuple[str, Path]:
    """The digest that `verify` returns, and the folder whose files were compared."""
    from recspec.base.files import manifest
    from recspec.bundle import find_export
    from recspec.bundle import folder as bundle

    folder = find_export(Path(run)) or bundle.find(Path(run))
    digest = manifest.check(folder)
    if expect is not None and digest != expect.strip().lower():
        raise BundleError(f"{folder}: its manifest has the digest {digest}; expected {expect}")
    return digest, folder


@dataclass(frozen=True, repr=False)
class Imported(Viewed):
    """A bundle made from a model of TensorFlow."""

    folder: Path
    summary: Mapping[str, object]
    notes: tuple[str, ...]

    def __fspath__(self) -> str:
        return str(self.folder)

    def _view(self) -> View:
        return View(f"imported into {self.folder}", [figures("", self.summary)], self.notes)


@verb
def import_tf(model: Place, out: Place, *, columns: Place, force: bool = False) -> Imported:
    """Turn a Wide & Deep model of TensorFlow's estimators into a bundle, without TensorFlow.

    Args:
        model: Folder of a SavedModel or of checkpoints, or the prefix of a checkpoint.
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
