"""MovieLens 100K, 1M, 10M, 20M, 25M and latest, as GroupLens publishes them: a zip or its unpacked folder.

Every rating is a positive unless `min_rating` is set. Each user's last rating is for test, the last but one for valid.
With split time, the latest ratings of all users are held out instead; with split users, whole users.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.types import Table
from pydantic import Field

from recspec.base.errors import DataError, listed
from recspec.base.files import extract, open_zip
from recspec.data.prepare import (
    ROW,
    Backend,
    Cleaned,
    ColumnType,
    HistorySettings,
    Notes,
    PrepareContext,
    Prepared,
    Progress,
    TextFile,
    TimeSplitSettings,
    count_rows,
    fetch,
    prepared,
)
from recspec.datasets import table
from recspec.datasets.table_features import Tables, plan_features
from recspec.datasets.table_write import write_interactions
from recspec.feature_spec import FeatureSpec

NAME = "movielens"

CHECKSUMS = {"ml-1m.zip": "c4d9eecfca2ab87c1945afe126590906", "ml-20m.zip": "cd245b17a1ae2cc31bb14903e1204af3"}
"""MD5 that GroupLens publishes beside its downloads."""

GENRES_100K: Sequence[str] = """
unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical Mystery
Romance Sci-Fi Thriller War Western
""".split()
MOVIES_100K = ("movie_id", "title", "released", "video_released", "url", *GENRES_100K)
MOVIES = ("movie_id", "title", "genres")
NO_GENRES = "(no genres listed)"
USER_COLUMN, ITEM_COLUMN = "userId", "movieId"  # as the newer releases call them
USER_FEATURES = ("gender", "age", "occupation", "zip")
USERS_100K = ("user_id", "age", "gender", "occupation", "zip")


class Settings(HistorySettings, TimeSplitSettings):
    """Settings of MovieLens."""

    min_rating: float | None = Field(None, description="minimum number of stars; null: all ratings")
    dislike_below: float | None = Field(
        None, description="stars below which a rating is a dislike, from which some models learn; null: none are"
    )
    min_interactions: int = Field(1, ge=1, description="users with fewer distinct movies are left out")
    num_negatives: int = Field(100, ge=0, description="candidates beside the positive in each series of valid and test")
    seed: int = Field(1, ge=0, description="seed of the negatives of valid and test")
    max_unpacked: str | None = Field(
        None,
        description="maximum unpacked size of a file in the zip, such as 20GB; null: 100 times its packed size, at "
        "least 1 GB",
    )


@dataclass(frozen=True)
class Layout:
    """The files of a release and their columns."""

    releases: str
    ratings: str
    movies: str
    users: str | None
    separator: str
    header: bool
    movie_columns: Sequence[str]
    user_columns: Sequence[str] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.ratings, self.movies, self.users)))


LAYOUTS = (
    Layout("100K", "u.data", "u.item", "u.user", "\t", False, MOVIES_100K, USERS_100K),
    Layout("1M", "ratings.dat", "movies.dat", "users.dat", "::", False, MOVIES, ("user_id", *USER_FEATURES)),
    Layout("10M", "ratings.dat", "movies.dat", None, "::", False, MOVIES),
    Layout("20M, 25M, latest", "ratings.csv", "movies.csv", None, ",", True, ("movieId", "title", "genres")),
)


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a MovieLens release from its zip or folder."""
    raw = context.raw
    layout, found = recognise(raw)

    def build(folder: Path) -> FeatureSpec:
        checksum, files = None, found
        if raw.is_file():
            checksum = _check_sum(raw)
            files = _extracted(raw, found, folder / "work" / "raw", settings.max_unpacked)
        with context.connect(folder / "work" / "tables") as backend:
            return _build(backend, folder, layout, files, checksum, settings, context.progress)

    return prepared.run(context, NAME, settings, [raw] if raw.is_file() else list(found.values()), build)


def _build(
    backend: Backend,
    folder: Path,
    layout: Layout,
    files: Mapping[str, Path],
    checksum: str | None,
    settings: Settings,
    progress: Progress,
) -> FeatureSpec:
    progress("reading ratings", 0, None)
    ratings = _read_ratings(backend, layout, files[layout.ratings])
    num_ratings, least = count_rows(backend, ratings), settings.min_rating
    if num_ratings and least is not None and not count_rows(backend, ratings.filter(ratings["rating"] >= least)):
        raise DataError(f"none of {num_ratings:,} ratings has {least:g} stars; set min_rating lower")
    items = _staged(backend, _movies(backend, layout, files[layout.movies]), folder / "work" / "items.parquet")
    users = None
    if layout.users:
        users = _staged(backend, _users(backend, layout, files[layout.users]), folder / "work" / "users.parquet")
    tables = Tables(backend, _as_of_table(settings, layout), Notes(), ratings, users, items)

    def summary(num_rows: int, cleaned: Cleaned) -> dict[str, object]:
        counts = {"release": layout.releases, "ratings": num_rows} | ({"checksum": checksum} if checksum else {})
        return {**counts, "below_min_rating_dropped": num_rows - cleaned.num_before}

    plan = plan_features(tables, files[layout.ratings])
    return write_interactions(folder, tables, plan, progress, dataset=NAME, summary=summary)


def _as_of_table(settings: Settings, layout: Layout) -> table.Settings:
    """The settings of your own table by which a release is prepared."""
    same = {*HistorySettings.model_fields, "min_interactions", "num_negatives", "seed", "unknown_targets", "split"}
    same |= {"window", "earlier"}
    shares = {"valid": settings.valid_share, "test": settings.test_share} if settings.window is None else {}
    held_out = {**shares, "heldout_users": settings.heldout_users} if settings.split != "leave_one_out" else {}
    stars = {"min_rating": settings.min_rating, "dislike_below": settings.dislike_below}
    given = {name: value for name, value in stars.items() if value is not None}
    least = {"min_rating": settings.dislike_below, "rating": "rating"} if given else {}
    of_users = {"users": layout.users, "user_features": USER_FEATURES, "categorical": USER_FEATURES}
    return table.Settings.model_validate(
        {
            **settings.model_dump(include=same),
            **held_out,
            **least,
            **given,
            **(of_users if layout.users else {}),
            "user": USER_COLUMN,
            "item": ITEM_COLUMN,
            "items": layout.movies,
            "item_features": ("genres",),
            "lists": ("genres",),
            "title": "title",
            "repeats": "first",
            "layout": "rows",
            "label": None,
        }
    )


def _staged(backend: Backend, held: pa.Table, file: Path) -> Table:
    pq.write_table(held, file)
    return backend.read_parquet([file], row=True)


# --- the files' contents ---------------------------------------------------------------------------------------------


def _read_ratings(backend: Backend, layout: Layout, path: Path) -> Table:
    names = (USER_COLUMN, ITEM_COLUMN, "rating", "timestamp")
    kinds: dict[str, ColumnType] = {name: "float64" if name == "rating" else "int64" for name in names}
    file = TextFile(
        path,
        kinds,
        separator=layout.separator,
        header=layout.header,
        quote='"' if layout.header else "",
        required=names,
    )
    return backend.read_text(file)


def _movies(backend: Backend, layout: Layout, path: Path) -> pa.Table:
    held = _small_table(backend, layout, path, layout.movie_columns)
    genres = held.column("genres") if "genres" in held.column_names else _genres_of_flags(held)
    year = pc.struct_field(pc.extract_regex(held.column("title"), r"\((?P<year>[0-9]{4})\)\s*$"), "year")
    return pa.table(
        {
            ITEM_COLUMN: held.column(layout.movie_columns[0]),
            "title": held.column("title"),
            "genres": pc.if_else(pc.equal(genres, NO_GENRES), None, genres),
            "year": year.cast(pa.int32()),
        }
    )


def _genres_of_flags(table: pa.Table) -> pa.Array:
    """`Action|Comedy` from one column of 0 and 1 for each genre."""
    rows = zip(*(table.column(genre).to_pylist() for genre in GENRES_100K), strict=True)
    return pa.array(
        ["|".join(g for g, flag in zip(GENRES_100K, row, strict=True) if flag == "1") for row in rows], pa.string()
    )


def _users(backend: Backend, layout: Layout, path: Path) -> pa.Table:
    held = _small_table(backend, layout, path, layout.user_columns)
    return held.select(["user_id", *USER_FEATURES]).rename_columns([USER_COLUMN, *USER_FEATURES])


def _small_table(backend: Backend, layout: Layout, path: Path, names: Sequence[str]) -> pa.Table:
    """A file of users or movies: text, except the id in its first column and ages."""
    columns: dict[str, ColumnType] = {name: "int64" if name in (names[0], "age") else "string" for name in names}
    separator = "|" if layout.separator == "\t" else layout.separator
    file = TextFile(
        path,
        columns,
        separator=separator,
        header=layout.header,
        encoding=_encoding(path),
        quote='"' if layout.header else "",
        multiline=True,
        required=(names[0],),
    )
    return fetch(backend, backend.read_text(file).order_by(ROW).drop(ROW))


def _encoding(path: Path) -> Literal["utf-8", "latin-1"]:
    """The older releases hold Latin-1, the newer ones UTF-8; Latin-1 titles are not valid UTF-8."""
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


# --- the files themselves --------------------------------------------------------------------------------------------


def recognise(raw: Path) -> tuple[Layout, dict[str, Path]]:
    """The release in a zip or folder, and the paths of its files (inside the zip: their names)."""
    places = {*_places(raw)}
    found: dict[Path, tuple[Layout, dict[str, Path]]] = {}
    for folder in sorted({place.parent for place in places}):
        for layout in LAYOUTS:  # 1M comes before 10M, whose files it includes
            files = {name: folder / name for name in layout.files}
            if places.issuperset(files.values()):
                found.setdefault(folder, (layout, files))
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise DataError(f"{raw}: holds several releases, in {listed(map(str, found))}; name one of these folders")
    names = sorted({place.name for place in places})
    shown = listed(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    expected = [f"MovieLens {layout.releases} has {', '.join(layout.files)}" for layout in LAYOUTS]
    raise DataError.of(f"{raw}: not a MovieLens release; found {shown}", expected)


def _places(raw: Path) -> list[Path]:
    if raw.is_file():
        with open_zip(raw) as archive:
            return [Path(info.filename) for info in archive.infolist() if not info.is_dir()]
    if not raw.is_dir():
        raise DataError(f"{raw}: no such file or folder; expected a MovieLens zip or its unpacked folder")
    return [path for path in sorted([*raw.glob("*"), *raw.glob("*/*")]) if path.is_file()]


def _extracted(raw: Path, members: Mapping[str, Path], folder: Path, limit: str | None) -> dict[str, Path]:
    """Extract the release's files from the zip, to paths that do not depend on the members' own."""
    folder.mkdir(parents=True)
    with open_zip(raw) as archive:
        for name, member in members.items():
            extract(archive, member.as_posix(), folder / name, limit)
    return {name: folder / name for name in members}


def _check_sum(raw: Path) -> str:
    """The result of comparing the zip's MD5 with the publisher's, if the zip has the name of a known release."""
    with raw.open("rb") as stream:
        found = hashlib.file_digest(stream, "md5").hexdigest()
    for name, digest in CHECKSUMS.items():
        if found == digest:
            return f"PASSED: {name}, MD5 {found}"
    if raw.name in CHECKSUMS:
        raise DataError(
            f"{raw}: checksum FAILED: MD5 is {found}, the publisher's is {CHECKSUMS[raw.name]}; download it again, or "
            "rename the file if it is meant to be another one"
        )
    return f"not a known release, so not compared: MD5 {found}"
