"""Commands that name items: recommend, similar."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from recspec.base.errors import SettingsError, how_many
from recspec.base.machine import keep_freed_memory
from recspec.base.summaries import as_data
from recspec.cli.console import (
    Device,
    Engine,
    Json,
    Run,
    ShardSize,
    Verify,
    Workers,
    err,
    how_of,
    out,
    print_counts,
    print_json,
    print_unknown,
    shard_problems,
    stages,
    tell,
    titled_table,
)

if TYPE_CHECKING:
    from recspec.inference import Recommendation, RecommendedItem, SimilarItems


NEXT_ID = re.compile(r'\s*"((?:[^"]|"")+)"\s*(?:,|$)|([^,]+)(?:,|$)')
K = Annotated[int, Option("-k", min=1, help="Number of items.")]
Filter = Annotated[
    str | None,
    Option("--filter", metavar="EXPRESSION", help="Condition on items, such as 'in_stock and price < 50'."),
]
Exclude = Annotated[str | None, Option(metavar="A,B", help="Raw ids of items to leave out.")]
Items = Annotated[
    str | None,
    Option(
        metavar="A,B",
        help="Basket of raw item ids, oldest first, instead of a user's history.",
    ),
]
Context = Annotated[
    list[str] | None,
    Option(metavar="COLUMN=VALUE", help="Raw column of the request; repeatable."),
]
Diversity = Annotated[float, Option(min=0, max=1, help="Weight of variety, from 0 to 1.")]
DiverseBy = Annotated[
    str | None,
    Option(
        metavar="COLUMN",
        help="Item column that measures likeness; by default the model's item vectors.",
    ),
]
Columns = Annotated[str | None, Option(metavar="A,B", help="Columns of the item catalogue to show.")]
BOOST = Option(
    metavar="EXPRESSION:WEIGHT",
    help="Weight added to the scores of some items, such as 'is_new: 1.5'; repeatable.",
)


def recommend(
    run: Run,
    user: Annotated[list[str] | None, Option(help="Raw user id; repeatable.")] = None,
    users: Annotated[Path | None, Option(help="File with one raw user id per line.")] = None,
    all_users: Annotated[bool, Option("--all", help="Recommend to every user; needs --out.")] = False,
    items: Items = None,
    context: Context = None,
    k: K = 10,
    filter_text: Filter = None,
    exclude: Exclude = None,
    include_seen: Annotated[bool, Option(help="Include items that the user acted on before.")] = False,
    diversity: Diversity = 0.0,
    diverse_by: DiverseBy = None,
    boost: Annotated[list[str] | None, BOOST] = None,
    explain: Annotated[bool, Option(help="Name the events that explain each item.")] = False,
    columns: Columns = None,
    out_file: Annotated[Path | None, Option("--out", help="Parquet file, or folder of shards.")] = None,
    workers: Workers = 1,
    engine: Engine = "local",
    shard_size: ShardSize = None,
    json_output: Json = False,
    device: Device = "auto",
    verify: Verify = True,
) -> None:
    """Recommend k items to users, baskets or contexts.

    Items that a user acted on before are left out. Only the order of a user's scores has a meaning.
    """
    from recspec.inference import (
        Predictor,
        RecommendRequest,
        catalogue_columns,
        read_users,
        recommend_shards,
        recommend_to_parquet,
    )

    keep_freed_memory()
    given, problems = _context(context or [])
    named = bool(user or users or all_users)
    if not named and not items and not given and not problems:
        problems.append("name users with --user ID, --users FILE, or take --all with --out FILE; or give --items")
    if items and not _ids(items):
        problems.append(f"--items {items[:80]}: holds no id")
    if out_file is not None and out_file.suffix not in ("", ".parquet"):
        problems.append(
            f"--out {out_file}: expected a name that ends in .parquet, or without an ending for a folder of shards"
        )
    in_shards = out_file is not None and not out_file.suffix
    if in_shards and user:
        problems.append("--user: a folder of shards is for --all or --users FILE")
    if not in_shards:
        problems += shard_problems(workers, engine, shard_size)
    if out_file is not None and explain:
        problems.append("--explain: the Parquet file has no room for explanations; take --json without --out")
    if out_file is not None and columns:
        problems.append("--columns: the Parquet file has ids and scores alone; join columns to it by item")
    if out_file is not None and not named:
        problems.append("--out: names users; without a user, take --json")
    if all_users and out_file is None:
        problems.append("--all needs --out FILE.parquet, or --out FOLDER")
    if problems:
        raise SettingsError.of("recommend", problems)
    chosen = [] if in_shards else [*(user or []), *(read_users(users) if users else [])]
    wanted = RecommendRequest(
        users=tuple(chosen),
        items=_ids(items),
        context=given,
        k=k,
        filter=filter_text,
        exclude=_ids(exclude),
        include_seen=include_seen,
        diversity=diversity,
        diverse_by=diverse_by,
        boosts=tuple(boost or ()),
        explain=explain,
    )
    predictor = Predictor.open(run, device=device, verify=verify)
    if out_file is not None and in_shards:
        started = time.perf_counter()
        with stages() as progress:
            counts = recommend_shards(
                predictor,
                None if all_users else users,
                out_file,
                wanted,
                how_of(workers, engine, shard_size),
                progress=progress,
                note=tell,
            )
        print_counts(out_file, counts, time.perf_counter() - started, "user")
        print_unknown(predictor, wanted, counts.unknown)
        return
    if out_file is not None:
        started = time.perf_counter()
        with stages() as progress:
            count, unknown_users = recommend_to_parquet(
                predictor, None if all_users else chosen, out_file, wanted, progress=progress
            )
        seconds = time.perf_counter() - started
        err.print(f"{out_file}: {how_many(count, 'user')}, {count / seconds:,.0f} users/s")
        print_unknown(predictor, wanted, unknown_users)
        return
    answers, names = predictor.recommend(wanted), [name.strip() for name in (columns or "").split(",") if name.strip()]
    shown = [
        {name: each.to_pylist() for name, each in found.items()}
        for found in (catalogue_columns(predictor, names, [item.item for item in answer.items]) for answer in answers)
    ]
    if json_output:
        print_json([_with_columns(answer, fields) for answer, fields in zip(answers, shown, strict=True)])
    else:
        for answer, fields in zip(answers, shown, strict=True):
            print_recommendation(answer, fields=fields)


def similar(
    run: Run,
    item: Annotated[str, Argument(help="Raw id of the item.", metavar="ITEM")],
    k: K = 10,
    filter_text: Filter = None,
    exclude: Exclude = None,
    json_output: Json = False,
    device: Device = "auto",
    verify: Verify = True,
) -> None:
    """Find the items most similar to one item."""
    from recspec.inference import Predictor

    keep_freed_memory()
    predictor = Predictor.open(run, device=device, verify=verify)
    found = predictor.similar(item, k=k, filter=filter_text, exclude=_ids(exclude))
    if json_output:
        print_json(found.to_dict())
    else:
        print_similar(found)


def _ids(text: str | None) -> tuple[str, ...]:
    """Raw ids between commas; one with a comma, or with blanks at its ends, stands in double quotes."""
    found = (quoted.replace('""', '"') or bare.strip() for quoted, bare in NEXT_ID.findall(text or ""))
    return tuple(each for each in found if each)


def _context(texts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Columns and values of `COLUMN=VALUE`, and what is wrong with them."""
    found, problems = dict[str, str](), list[str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            problems.append(f"--context {text[:80]}: expected COLUMN=VALUE")
        elif name.strip() in found:
            problems.append(f"--context {name.strip()[:80]}: is given twice")
        found[name.strip()] = value
    return found, problems


def _with_columns(answer: Recommendation, fields: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """The answer as plain values; `columns` of an item are those of the catalogue that were asked for."""
    found: dict[str, Any] = answer.to_dict()
    for place, item in enumerate(found["items"] if fields else ()):
        item["columns"] = {name: values[place] for name, values in fields.items()}
    return found


def print_recommendation(
    answer: Recommendation, liked: Sequence[str] = (), fields: Mapping[str, Sequence[object]] | None = None
) -> None:
    """Print one user's items as a table, with columns of the catalogue."""
    if liked:
        out.print(f"user {answer.user} acted on, among others: {'; '.join(liked)}")
    is_popular = answer.answered_by == "popularity"
    if answer.user is None:
        who = "the most popular items" if is_popular else f"answered by the {answer.answered_by}".replace("_", "'s ")
    else:
        so = "" if answer.known else "unknown, so "
        who = f"user {answer.user}" + (f": {so}the most popular items" if is_popular else "")
    _print_items(who, answer.items, fields or {}, whole=is_popular)
    for note in answer.notes:
        out.print(f"note: {note}")


def print_similar(found: SimilarItems) -> None:
    """Print the items like one as a table."""
    _print_items(f"like {found.item}{f': {found.title}' if found.title else ''}", found.items)
    for note in found.notes:
        out.print(f"note: {note}")


def _print_items(
    heading: str,
    items: Sequence[RecommendedItem],
    fields: Mapping[str, Sequence[object]] = MappingProxyType({}),
    *,
    whole: bool = False,
) -> None:
    """A table of items with their scores, whole numbers or logits, and with their reasons if there are any."""
    table = titled_table(heading)
    titled, explained = any(item.title for item in items), any(item.because for item in items)
    staged = any(item.retrieved_by is not None for item in items)
    more = [name for name, is_there in (("because", explained), ("retrieved by", staged)) if is_there]
    for name in ("", "item", *(["title"] if titled else []), "score", *fields, *more):
        table.add_column(name, justify="left" if name in ("title", *more) else "right")
    for rank, item in enumerate(items, start=1):
        score = f"{item.score:.0f}" if whole and item.boost is None else f"{item.score:.4f}"
        row = [str(rank), str(item.item), *([item.title or ""] if titled else []), score]
        told = {"because": _reasons(item), "retrieved by": ", ".join(item.retrieved_by or ())}
        table.add_row(*row, *(as_data(values[rank - 1]) for values in fields.values()), *(told[name] for name in more))
    out.print(table)


def _reasons(item: RecommendedItem) -> str:
    """The events that spoke for an item: their shares of the score, or their cosines to it."""
    if item.because is None:
        return ""
    sign = "+" if item.because.kind == "shares" else ""
    return "; ".join(f"{each.title or each.item} {each.value:{sign}.3f}" for each in item.because.events)
