"""A pipeline from trained runs: the ranker's bundle, with the retrievers' bundles and their indexes in it."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recspec.base.errors import BundleError, RequestError, SettingsError, listed, shortened
from recspec.base.files import PathError, copy, local, locked_inside, manifest, named_path, whole_folder
from recspec.bundle import Bundle, Card, DataRecord, PipelineCard, RetrieverCard, meaning_digest, run_record
from recspec.bundle import cards as pipeline_card
from recspec.bundle import folder as bundle
from recspec.data.encoding import Encoders
from recspec.inference.catalogue import Catalogues
from recspec.inference.index import ItemIndex
from recspec.inference.pipeline import can_retrieve, has_vectors, item_vectors, may_bring, request_vectors
from recspec.inference.ranker_growing import grow_ranker
from recspec.inference.raw_columns import RawCatalogue
from recspec.models import ItemModel
from recspec.models.layers import Batch
from recspec.training import dataset_of

BUNDLE = "bundle"
SAMPLE = 1_024
"""Users whose vectors are typical queries of an index."""

Progress = Callable[[str, float, float | None], None]


@dataclass(frozen=True)
class BuiltRetriever:
    """One retriever of a new pipeline."""

    name: str
    run: Path
    model: str
    items: int
    """Items that it may bring."""
    search: str
    """How it finds them."""


@dataclass(frozen=True)
class Built:
    """A new pipeline."""

    bundle: Path
    ranker: Path
    model: str
    card: PipelineCard
    retrievers: Sequence[BuiltRetriever]
    items: int
    kept: int
    """Items that the filter keeps."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "bundle": str(self.bundle),
            "candidates": self.card.candidates,
            "filter": self.card.filter,
            "items": self.items,
            "kept_by_the_filter": self.kept,
            "retrievers": [{**vars(each), "run": str(each.run)} for each in self.retrievers],
            "ranker": {"run": str(self.ranker), "model": self.model},
        }


def build_pipeline(
    target: Path,
    retrievers: Sequence[str],
    ranker: Path | None,
    *,
    candidates: int = 500,
    filter: str | None = None,
    device: torch.device | None = None,
    progress: Progress = lambda _stage, _done, _total: None,
) -> Built:
    """Write a pipeline to `target/bundle`: retrievers find candidates, and the ranker orders them.

    Args:
        target: folder of the new run.
        retrievers: runs or bundles as PATH or NAME=PATH; by default a retriever is called as its model.
        ranker: the run or bundle that ranks the candidates; None, or `lightgbm` where no run is called so, grows
            trees over the retrievers' scores.
        candidates: items that the ranker scores for each request.
        filter: expression over the columns of the item catalogue; other items are never candidates.
        device: where vectors are computed.
        progress: called with a stage, the amount done and the whole amount.

    Raises:
        SettingsError: naming every run that can't take part, and why.
        BundleError: if a run holds no bundle, or a damaged one.
        DataError: if another process writes a run in `target`.
    """
    target, started = local(target, "OUT"), time.monotonic()
    with locked_inside(target, "building a pipeline in", holds=BUNDLE):
        if (target / BUNDLE).exists():
            raise SettingsError(f"{target}: holds a run already; name another folder")
        if (target / "bundle.json").exists():
            raise SettingsError(f"{target}: is a bundle, whose files must stay as they are; name another folder")
        given = ranker if ranker is None or not _is_grown(ranker) else None
        built, data = _build(target, retrievers, given, candidates, filter, device, progress)
        parts = [*([] if given is None else [given]), *(each.run for each in built.retrievers)]
        record = run_record.begin(target, "pipeline", built.model, data, made_of=parts)
        record.finish(target, time.monotonic() - started)
        return built


def _build(
    target: Path,
    retrievers: Sequence[str],
    ranker: Path | None,
    candidates: int,
    filter: str | None,
    device: torch.device | None,
    progress: Progress,
) -> tuple[Built, DataRecord | None]:
    named = [named_path(text, "--retriever") for text in retrievers]
    trained = [bundle.load(path, device=device) for _, path in named]
    if ranker is None:
        model, facts = grow_ranker(dataset_of(trained[0].folder, None), trained, candidates, progress)
        card = Card(
            model=model.name,
            settings=model.settings.model_dump(mode="json"),
            train={"train_splits": ["train"]},
            trained={"stopped": "fitted", "splits": ["train"], **facts},
        )
        with tempfile.TemporaryDirectory() as place:
            where = bundle.save(Path(place) / BUNDLE, model, card, seen=trained[0].seen)
            first = bundle.load(where, device=device)
            return _join(target, first, None, named, trained, candidates, filter, device, progress)
    first = bundle.load(ranker, device=device)
    return _join(target, first, ranker, named, trained, candidates, filter, device, progress)


GROWN = "lightgbm"


def _is_grown(ranker: Path) -> bool:
    """Whether the ranker is to be grown; a run of this name is a run."""
    return str(ranker) == GROWN and not ranker.exists()


def _join(
    target: Path,
    first: Bundle,
    ranker: Path | None,
    named: Sequence[tuple[str, Path]],
    trained: Sequence[Bundle],
    candidates: int,
    filter: str | None,
    device: torch.device | None,
    progress: Progress,
) -> tuple[Built, DataRecord | None]:
    name_of_ranker = Path(GROWN) if ranker is None else ranker
    _check(name_of_ranker, first, [path for _, path in named], trained)
    names = _names([name for name, _ in named], [each.card.model for each in trained], candidates)
    cards = [
        RetrieverCard(name=name, has_index=has_vectors(each.model)) for name, each in zip(names, trained, strict=True)
    ]
    encoders = Encoders.load(first.folder) if first.spec.metadata.get("encoders") else None
    known = Catalogues(first.spec, encoders, torch.device("cpu") if device is None else device)
    kept = _num_kept(first, encoders, filter)  # refuses a filter that can't be read
    card = PipelineCard(candidates=candidates, filter=filter, retrievers=tuple(cards))
    found = []
    with whole_folder(target / BUNDLE) as folder:
        _copy(first, folder)
        for number, (name, each, (_, path)) in enumerate(zip(names, trained, named, strict=True)):
            progress("retrievers", number, len(trained))
            where = folder / pipeline_card.RETRIEVERS / name
            _copy(each, where, without=("seen.safetensors", bundle.EVENTS))
            mask = _brings(each, first)
            note = f"all {int(mask.sum()):,} items are scored"
            if has_vectors(each.model):
                each.model.eval().prepare_for_inference()
                index = _index(each, known, mask)
                index.save(where)
                note = index.note
            found.append(BuiltRetriever(name, path, each.card.model, int(mask.sum()), note))
        with_events = next((each for each in (first, *trained) if bundle.EVENTS in manifest.names(each.folder)), first)
        if with_events is not first:  # one file for all of them: they know the same events
            _copy(with_events, folder, only=(bundle.EVENTS,))
        text = card.model_dump_json(indent=2) + "\n"
        (folder / pipeline_card.FILE_NAME).write_text(text, encoding="utf-8")
        manifest.write(folder)
    progress("retrievers", 1, 1)
    data = run_record.common_data(each.folder for each in (*([] if ranker is None else [first]), *trained))
    return Built(target / BUNDLE, name_of_ranker, first.card.model, card, found, len(known.items), kept), data


def _names(given: Sequence[str], models: Sequence[str], candidates: int) -> list[str]:
    """The retrievers' names: those given, or the models', with a number behind a model that is there again."""
    strange = [name for name in given if name and not re.fullmatch(pipeline_card.NAME, name)]
    problems = [f"'{shortened(name)}': expected a name of letters, digits, _ and -" for name in strange]
    problems += [f"two retrievers are called '{name}'" for name in sorted({*given} - {""}) if given.count(name) > 1]
    if not 1 <= len(given) <= pipeline_card.MOST_RETRIEVERS:
        problems.append(f"{len(given)} retrievers; expected 1 to {pipeline_card.MOST_RETRIEVERS}")
    if not 1 <= candidates <= pipeline_card.MOST_CANDIDATES:
        problems.append(f"{candidates} candidates; expected 1 to {pipeline_card.MOST_CANDIDATES:,}")
    SettingsError.refuse("pipeline build", problems)
    made: list[str] = []
    for name, model in zip(given, models, strict=True):
        free = (f"{model}_{number}" if number > 1 else model for number in range(1, 2 * len(models) + 2))
        made.append(name or next(each for each in free if each not in (*made, *given)))
    return made


def _check(ranker: Path, first: Bundle, paths: Sequence[Path], trained: Sequence[Bundle]) -> None:
    """Refuse what can't take part, and runs of unlike data."""
    problems = []
    lacks = [role for role in ("user", "item") if first.spec.id_of(role) is None]
    if lacks or first.seen is None:
        problems.append(f"{ranker}: the ranker knows no {' and no '.join(lacks) or 'users and items'}")
    problems += [
        f"{path}: is a pipeline; name the runs that it was made of"
        for path, each in zip((ranker, *paths), (first, *trained), strict=True)
        if each.pipeline is not None
    ]
    problems += [
        f"{path}: {each.card.model} finds no candidates, because it scores rows by their features; a retriever has "
        "vectors of requests and items, or ranks items by the users' events"
        for path, each in zip(paths, trained, strict=True)
        if not can_retrieve(each.model)
    ]
    own = {*first.model.features()}
    for path, each in zip(paths, trained, strict=True):
        lacking = [name for name in each.model.features() if name in each.spec.role("context") and name not in own]
        if lacking:
            problems.append(
                f"{path}: reads {listed(lacking)} of a request's context, which the ranker does not read; "
                "take a ranker that does"
            )
    ours = meaning_digest(first.spec)
    problems += [
        f"{path}: was trained on other data than {ranker}; train both on one prepared folder"
        for path, each in zip(paths, trained, strict=True)
        if meaning_digest(each.spec) != ours
    ]
    SettingsError.refuse("pipeline build", problems)


def _num_kept(first: Bundle, encoders: Encoders | None, text: str | None) -> int:
    """How many items the filter keeps."""
    spec = first.spec
    total = spec.num_ids(spec.item_id) - int(spec.reserves_unknown(spec.item_id))
    if text is None:
        return total
    try:
        count = int(RawCatalogue(spec, encoders).mask(text).sum())
    except RequestError as error:
        raise SettingsError.of("pipeline build: filter", error.problems) from None
    if not count:
        raise SettingsError(f"pipeline build: --filter {text!r} keeps none of the {total:,} items")
    return count


def _brings(each: Bundle, first: Bundle) -> np.ndarray[Any, np.dtype[np.bool_]]:
    assert first.seen is not None
    counts = first.seen.counts.numpy().astype(np.int64)
    return may_bring(each.model, counts, int(first.spec.reserves_unknown(first.spec.item_id)))


def _index(each: Bundle, known: Catalogues, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> ItemIndex:
    """The index of a retriever's items; recall is measured with users that the catalogue knows."""
    items: Batch = {} if isinstance(each.model, ItemModel) else known.items.features
    vectors, ids = item_vectors(each.model, items), np.flatnonzero(mask)
    queries = None
    if isinstance(each.model, ItemModel):
        users = np.arange(each.spec.num_ids(each.spec.user_id))
        chosen = np.sort(np.random.default_rng(0).choice(users, min(SAMPLE, len(users)), replace=False))
        queries = request_vectors(each.model, {each.spec.user_id: torch.from_numpy(chosen).to(each.model.device)})
    return ItemIndex.build(vectors if mask.all() else vectors[ids], ids, queries=queries)


def _copy(trained: Bundle, folder: Path, *, without: Sequence[str] = (), only: Sequence[str] | None = None) -> None:
    """Copy the files of a bundle that its manifest lists, or some of them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in manifest.names(trained.folder) if only is None else only:
            if name not in without:
                copy(name, trained.folder, folder)
    except (OSError, PathError) as error:
        raise BundleError(f"{folder}: the pipeline could not be written: {error}") from None
