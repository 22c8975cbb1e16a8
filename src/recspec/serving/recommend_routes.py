"""POST /recommend: the list for a user, basket or context, by the way that experiments choose; and what was shown.

With a journal, each list is logged as an exposure: which items, by which model and policy, with which chances. The
policy is a JSON object; its keys are in docs/guides/what_was_shown.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.base.errors import RecspecError, RequestError, unknown
from recspec.inference import LiveEvents, Predictor, Recommendation, RecommendRequest, requests
from recspec.serving import json_types as types
from recspec.serving.exposure_log import variant_label
from recspec.serving.http_bodies import json_response
from recspec.serving.json_routes import PARSED, Computed, computed, new_request_id
from recspec.serving.operations import Operation, routes_of
from recspec.serving.repository import Repository
from recspec.serving.showing import Way

if TYPE_CHECKING:
    from recspec.loop import Experiment, ListDraw

MOST_LOGGED = 1_000
"""Items of a list that are logged; nobody is shown more."""
MOST_REQUEST_BYTES = 8_192
"""Body of a request whose fields are logged with its list."""
NOT_LOGGED = {"model", "version", "user", "surface", "shown", "explain", "liked"}
"""Fields that don't shape a list, or have a column of their own."""
MOST_ERROR = 200
"""Characters of an error in the journal."""

log = logging.getLogger("recspec.serve")

Made = tuple[Recommendation, dict[str, Any]]


def routes(repository: Repository) -> list[Route]:
    """The routes."""
    return routes_of(OPERATIONS, repository)


@dataclass(frozen=True)
class _List:
    """A list, the request that it answers, and how it came about."""

    way: Way
    asked: types.RecommendRequest
    found: Computed[Made]

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items as the answer has them."""
        items: list[dict[str, Any]] = self.found.made[1]["items"]
        return items

    @property
    def version(self) -> str:
        """As the journal has it."""
        opened = self.found.endpoint.model.opened
        return f"{opened.update}:{opened.digest}"


async def _recommend(repository: Repository, request: Request) -> Response:
    began = time.perf_counter()
    body_reader = repository.body_reader
    async with body_reader.body(request) as body:
        read = partial(types.read_request, types.RecommendRequest, body)
        wanted = await body_reader.parsed(read, len(body))
        with body_reader.holding(PARSED * len(body)):
            answering = _Answering(repository, request, wanted, len(body), began)
            return json_response(await answering.answer())


class _Answering:
    """One request, from its reading to its answer."""

    def __init__(
        self, repository: Repository, request: Request, wanted: types.RecommendRequest, size: int, began: float
    ) -> None:
        self._repository, self._request, self._wanted = repository, request, wanted
        self._size, self._began, self._id = size, began, new_request_id()

    async def answer(self) -> dict[str, Any]:
        """The answer; it is counted, and logged."""
        wanted, ways = self._wanted, self._repository.ways
        variants, error = dict[str, str](), None
        if wanted.model is not None or wanted.version is not None:
            chosen: Sequence[Way] = [Way(wanted.model, wanted.version, exploration=ways.usual.exploration)]
        else:
            variants = {} if wanted.user is None else await ways.variants_of(wanted.user)
            chosen = ways.of(variants)
        try:
            made = await asyncio.gather(*map(self._list, chosen, range(len(chosen))))
        except Exception as failure:  # a variant's model may be anything
            if chosen == (ways.usual,) or not variants:
                raise
            made, error = [await self._list(ways.usual)], failure
            expected = isinstance(failure, RecspecError)
            log.warning("the usual model answers for a variant: %s", failure, exc_info=not expected)
        experiment, variant = ways.named(variants)
        teams = None if len(made) == 1 else _drafted(made, self._id)
        first, data = made[0], dict(made[0].found.made[1])
        if teams is not None:
            data["items"] = teams[0]
            data["notes"] = [*dict.fromkeys(note for each in made for note in each.found.made[1]["notes"])]
        if experiment is not None:
            data |= {"experiment": experiment, "variant": variant}
        answer = first.found.answer(self._id, data, self._began)
        self._count(answer, made, error)
        if wanted.shown and self._repository.exposures is not None:
            self._log(answer, made, variants, None if teams is None else teams[1], error)
        return answer

    async def _list(self, way: Way, place: int = 0) -> _List:
        """The list that a way gives; `place` is its place among those of this request."""
        draw, asked = None, self._wanted.model_copy(update={"model": way.model, "version": way.version, **way.fields})
        if way.exploration is not None:
            from recspec.loop import ListDraw

            draw = ListDraw(way.exploration, _seed(self._id, place))
        make = partial(_make, draw)
        return _List(way, asked, await computed(self._repository, self._request, asked, make, self._began))

    def _count(self, answer: Mapping[str, Any], made: Sequence[_List], error: Exception | None) -> None:
        count, wanted = len(answer["items"]), made[0].asked.k
        flags = {
            "unknown": answer["unknown_user"] and answer["user"] is not None,
            "short": 0 < count < wanted,
            "empty": not count,
            "error": error is not None,
        }
        model, _ = _models(made)
        label = variant_label(answer.get("experiment"), answer.get("variant"))
        raised = [name for name, is_so in flags.items() if is_so]
        seconds = time.perf_counter() - self._began
        self._repository.metrics.shown.count(model, label, answer["answered_by"], raised, seconds)

    def _log(
        self,
        answer: Mapping[str, Any],
        made: Sequence[_List],
        variants: Mapping[str, str],
        teams: Sequence[int] | None,
        error: Exception | None,
    ) -> None:
        from recspec.loop import ERROR, GREEDY, MILLISECONDS, TEAM_DRAFT, TEAMS, VARIANTS, Exposure, now_us

        wanted, first = self._wanted, made[0]
        recommended, exploration = first.found.made[0], first.way.exploration
        policy: dict[str, Any] = {"name": GREEDY} if exploration is None else exploration.to_dict()
        if teams is not None:
            policy = {"name": TEAM_DRAFT, TEAMS: teams[:MOST_LOGGED]}
        policy |= {"answered_by": answer["answered_by"], MILLISECONDS: answer["milliseconds"]}
        if self._size <= MOST_REQUEST_BYTES:
            policy["request"] = {
                **first.asked.model_dump(exclude_defaults=True, exclude=NOT_LOGGED),
                "k": first.asked.k,
            }
        if len(variants) > 1:
            policy[VARIANTS] = variants
        if error is not None:
            policy[ERROR] = str(error)[:MOST_ERROR] or type(error).__name__
        is_drawn = teams is not None or any(each.way.exploration is not None for each in made)
        chances = recommended.chances if teams is None else None
        model, version = _models(made)
        assert self._repository.exposures is not None
        self._repository.exposures.add(
            Exposure(
                self._id,
                None if wanted.user is None else str(wanted.user),
                now_us(),
                model,
                version,
                policy,
                max(each.found.history_seq or 0 for each in made),
                [str(each["item"]) for each in answer["items"][:MOST_LOGGED]],
                sum(each.found.made[0].pool_size for each in made),
                None if chances is None else chances[:MOST_LOGGED],
                self._id if is_drawn else None,
                wanted.surface,
                answer.get("experiment"),
                answer.get("variant"),
            )
        )


def _make(
    draw: ListDraw | None, predictor: Predictor, wanted: types.RecommendRequest, until: float, live: LiveEvents | None
) -> Made:
    asked = RecommendRequest(
        users=() if wanted.user is None else (wanted.user,),
        items=tuple(wanted.items),
        context=wanted.context,
        k=wanted.k,
        filter=wanted.filter,
        exclude=tuple(wanted.exclude),
        include_seen=not wanted.exclude_seen,
        diversity=wanted.diversity,
        diverse_by=wanted.diverse_by,
        boosts=tuple(wanted.boosts),
        at_most=wanted.at_most,
        explain=wanted.explain,
        until=until,
        draw=draw,
    )
    return requests.recommend_with_chances(predictor, asked, liked=wanted.liked, live=live)


def _seed(request_id: str, place: int) -> str:
    """The seed of a list; the first list's is the id of the answer, which the journal has."""
    return request_id if place == 0 else f"{request_id}.{place}"


def _models(made: Sequence[_List]) -> tuple[str, str]:
    """The models that answered and their versions; two are joined by +."""
    return "+".join(each.found.endpoint.name for each in made), "+".join(each.version for each in made)


def _drafted(made: Sequence[_List], seed: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The items of two lists, drawn in turn, and the team of each."""
    from recspec.loop import generator, interleave

    one, other = ({str(item["item"]): item for item in each.items} for each in made)
    names, teams = interleave([*one], [*other], generator(f"{seed}.teams"), made[0].asked.k)
    chosen = [(other if team == 1 or name not in one else one)[name] for name, team in zip(names, teams, strict=True)]
    return [{**item, "rank": rank} for rank, item in enumerate(chosen, start=1)], teams


# --- experiments -----------------------------------------------------------------------------------------------------


async def _experiments(repository: Repository, _: Request) -> Response:
    """The experiments that the server was started with."""
    found = repository.ways.experiments
    if not found or repository.journal is None:
        return json_response({"experiments": []})
    from recspec.loop import now_us, users_of_variants

    users = await repository.journal_reader.ask(partial(users_of_variants, repository.journal))
    now = now_us()
    return json_response({"experiments": [_described(each, users, now) for each in found]})


def _described(experiment: Experiment, users: Mapping[tuple[str, str], int] | None, now: int) -> dict[str, Any]:
    from recspec.loop import INTERLEAVED

    def count(variant: str) -> int | None:
        name = INTERLEAVED if experiment.interleave else variant
        return None if users is None else users.get((experiment.name, name), 0)

    ends = {"planned": experiment.start_us, "entering": experiment.entry_end_us, "measuring": experiment.end_us}
    return {
        "name": experiment.name,
        "start": _iso(experiment.start_us),
        "entry_end": _iso(experiment.entry_end_us),
        "end": _iso(experiment.end_us),
        "state": next((state for state, end in ends.items() if now < end), "ended"),
        "traffic": experiment.traffic,
        "interleave": experiment.interleave,
        "variants": [
            {**each.model_dump(include={"name", "share", "model", "version"}), "users": count(each.name)}
            for each in experiment.variants
        ],
    }


async def _verdict(repository: Repository, request: Request) -> Response:
    """What an experiment says so far: it reads the journal's part of it, one request after the other."""
    from recspec.loop import analyse, now_us, read_outcomes

    names = {each.name: each for each in repository.ways.experiments}
    name = request.path_params["experiment"]
    if name not in names or (journal := repository.journal) is None:
        raise RequestError(unknown("experiment", name[:80], names), status=404)
    found, at = names[name], now_us()
    report = await repository.journal_reader.study(lambda: analyse(found, read_outcomes(journal, found, at), at))
    return json_response({"name": name, "at": _iso(at), "verdict": report.verdict, "notes": list(report.notes)})


def _iso(micros: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).isoformat(timespec="seconds")


OPERATIONS = (
    Operation(
        "POST",
        "/recommend",
        "The best items for a user, basket or context",
        types.Recommendation,
        _recommend,
        types.RecommendRequest,
    ),
    Operation("GET", "/experiments", "The experiments, and the users of each variant", types.Experiments, _experiments),
    Operation(
        "GET",
        "/experiments/{experiment}",
        "What an experiment says so far",
        types.ExperimentVerdict,
        _verdict,
    ),
)
