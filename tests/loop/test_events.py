"""Events as they are sent: what is read, what is refused and why."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recspec.loop import read_events

NOW = 1_764_320_400_000_000  # 2025-11-28T09:00:00Z
GIVEN = {"user": "ann", "item": 7, "type": "view"}


def test_a_whole_event() -> None:
    sent = {**GIVEN, "value": 3, "time": "2025-11-28T10:00:00+01:00", "id": "x", "request": "r", "position": 2}
    (event,) = read_events([{**sent, "price": 9.5, "app": "web"}], NOW).events
    assert event.event_id == "x"
    assert event.content == ("ann", "view", "7", 3.0, "r", 2, '{"app": "web", "price": 9.5}')
    assert (event.occurred_at, event.received_at) == (NOW, NOW)


def test_an_event_without_an_id_gets_the_same_one_again_if_it_says_when_it_was() -> None:
    first, again = (read_events([{**GIVEN, "time": 1_700_000_000}], now).events[0] for now in (NOW, NOW + 5))
    assert first.event_id == again.event_id
    first, again = (read_events([GIVEN], NOW).events[0] for _ in range(2))
    assert first.event_id != again.event_id
    assert first.occurred_at == NOW


def test_times_ahead_are_clamped() -> None:
    seconds = NOW // 1_000_000
    found = read_events([{**GIVEN, "time": seconds + 299}, {**GIVEN, "time": seconds + 301}], NOW)
    assert [each.occurred_at for each in found.events] == [NOW + 299_000_000, NOW]
    assert found.clamped == {1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("ann", "found str; expected an object with 'user', 'item'"),
        ({"usr": "ann", "item": 1, "type": "view"}, r"user: missing \(did you mean 'usr'\?\)|user: missing.*usr"),
        ({**GIVEN, "user": " "}, "user: found ' '; expected a text or a whole number"),
        ({**GIVEN, "user": True}, "user: found 'True'; expected"),
        ({**GIVEN, "user": "a" * 1_001}, "user: 1,001 characters; expected at most 1,000"),
        ({**GIVEN, "user": "  "}, "user: found '  '; expected a text or a whole number"),
        ({**GIVEN, "id": "\U0001f600" * 501}, "id: 2,004 bytes as UTF-8; expected at most 2,000"),
        ({**GIVEN, "item": "a\0"}, "item: holds a character that is no text"),
        ({**GIVEN, "item": "\ud800"}, "item: holds a character that is no text"),
        ({**GIVEN, "item": None}, "item: found 'None'"),
        ({"user": "ann", "type": "view"}, "item: missing"),
        ({**GIVEN, "type": "v" * 65}, "type: 65 characters; expected at most 64"),
        (
            {**GIVEN, "time": "2025-11-28T10:00:00"},
            "time: found '2025-11-28T10:00:00'; expected seconds since 1970, or",
        ),
        (
            {**GIVEN, "time": 1_764_320_400_000},
            "time: found '1764320400000'; expected seconds.*; divide milliseconds by",
        ),
        ({**GIVEN, "time": math.nan}, "time: found 'nan'"),
        ({**GIVEN, "time": -1}, "time: found '-1'"),
        ({**GIVEN, "value": "3"}, "value: found '3'; expected a number"),
        ({**GIVEN, "value": math.inf}, "value: found 'inf'"),
        ({**GIVEN, "position": 0}, "position: found '0'; expected a whole number from 1 to 10,000"),
        ({**GIVEN, "more": math.nan}, "'more': expected texts, finite numbers"),
        ({**GIVEN, "more": "a" * 5_000}, "'more': 5,012 characters; expected at most 4,000 together"),
    ],
)
def test_other_rows_are_refused(row: object, message: str) -> None:
    found = read_events([GIVEN, row], NOW)
    assert len(found.events) == 1
    assert found.places == [0]
    (refused,) = found.refused
    assert refused.index == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused.reason)


def test_every_problem_of_a_row_is_named() -> None:
    (refused,) = read_events([{"type": 1.5, "value": "x"}], NOW).refused
    assert [each.partition(":")[0] for each in refused.reason.split("; ")[:2]] == ["user", "type"]
    assert "value: found 'x'; expected a number" in refused.reason
    assert read_events([{"user": "ann", "type": "impression", "request": "r"}], NOW).events[0].item is None


DEEP: list[object] = []
for _ in range(2_000):
    DEEP = [DEEP]


@pytest.mark.parametrize("field", ["user", "item", "type", "time", "value", "id", "request", "position", "more"])
@pytest.mark.parametrize(
    "value", [DEEP, 10**400, -(10**400), 10**5_000, {"a": DEEP}], ids=["deep", "401", "-401", "5001", "in an object"]
)
def test_whatever_is_too_deep_or_too_large_for_a_text_is_refused(field: str, value: object) -> None:
    found = read_events([GIVEN, {**GIVEN, field: value}], NOW)
    if field != "more" or (value != 10**400 and value != -(10**400)):  # which fits into a context
        (refused,) = found.refused
        assert refused.reason.startswith(field) or "'more'" in refused.reason
        assert len(refused.reason) < 600


def test_of_many_rows_the_first_are_told_what_a_missing_column_may_be_called() -> None:
    rows = [{f"usr{number}": 1 for number in range(20)}] * 1_000
    reasons = [each.reason for each in read_events(rows, NOW).refused]
    assert [at for at, each in enumerate(reasons) if "user: missing (did you mean 'usr" in each] == [*range(20)]
    assert len(reasons) == 1_000
    assert "did you mean" not in read_events([{f"usr{number}": 1 for number in range(50)}], NOW).refused[0].reason


def test_a_context_of_half_characters_is_refused_and_an_escaped_one_is_none() -> None:
    for row in ({"more": "\ud800"}, {"\ud800": 1}, {"more": ["\udfff"]}):
        (refused,) = read_events([{**GIVEN, **row}], NOW).refused
        assert refused.reason.endswith(": holds a character that is no text")
        refused.reason.encode()
    for text in ("\\ud800", "\0", "😀", "\\\\ud800"):
        assert read_events([{**GIVEN, "more": text}], NOW).events


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
        lambda each: (
            st.lists(each)
            | st.dictionaries(st.sampled_from(["user", "item", "type", "time", "value", "id", "position", "x"]), each)
        ),
    )
)
def test_whatever_is_sent_is_an_event_or_refused(row: object) -> None:
    found = read_events([row], NOW)
    assert len(found.events) + len(found.refused) == 1
    for event in found.events:
        event.subject.encode(), (event.item or "").encode(), event.event_id.encode()
