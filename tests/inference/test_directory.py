"""Users and items found by a part of their id or title."""

from __future__ import annotations

from recspec.inference.directory import Directory
from recspec.inference.predictor import Predictor


def test_items_are_found_by_id_title_and_part_whatever_the_case(films: Predictor) -> None:
    items = Directory(films, "item")
    assert len(items) == 30
    assert [each["item"] for each in items.find("107", 5)] == ["107"]
    assert items.find("ITEM, number 11", 3)[0]["title"].startswith("Item, number 11")
    assert {each["item"] for each in items.find("number 11", 30)} == set(map(str, range(110, 120)))
    assert items.find("nothing like it", 5) == []


def test_the_busiest_come_first_where_nothing_is_typed(films: Predictor) -> None:
    users, items = Directory(films, "user").find("", 3), Directory(films, "item").find(" ", 30)
    assert len(users) == 3
    assert all(each["count"] == 11 for each in users)
    counts = [each["count"] for each in items]
    assert counts == sorted(counts, reverse=True)


def test_the_id_itself_comes_before_beginnings_of_others(films: Predictor) -> None:
    users = Directory(films, "user")
    assert [each["user"] for each in users.find("u3", 1)] == ["u3"]
    assert {each["user"] for each in users.find("U3", 99)} == {"u3", *(f"u3{number}" for number in range(10))}
