"""The first hour with recspec, by its tutorial `docs/tutorials/first_steps.md`."""

from __future__ import annotations

from typing import Any


def recommendations(events: Any) -> Any:
    import recspec as rs

    data = rs.prepare(events, "data")
    model = rs.train("item_knn", data, "run")
    return model.recommend(["1", "2", "3"], k=10)


def comparison(events: Any) -> Any:
    import recspec as rs

    data = rs.prepare(events, "data")
    knn = rs.train("item_knn", data, "run")
    ease = rs.train("ease", data, "run-ease")
    return rs.compare([knn, ease], data, protocol="full").comparisons()


def endpoint(events: Any) -> Any:
    import recspec as rs

    data = rs.prepare(events, "data")
    model = rs.train("item_knn", data, "run")
    return model.serve(http_port=0)


OWN_CODE: dict[str, str] = {}
ASK = ("/recommend", {"user": "1", "k": 10})
