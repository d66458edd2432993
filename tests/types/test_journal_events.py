"""Every event of the journal survives being written down, by itself and among the others."""

import inspect
import typing
from typing import Any

import msgspec
import pytest

from rollart.conformance.sink import example
from rollart.types import journal
from rollart.types.ids import TrajectoryId
from rollart.types.journal import Event, JournalEvent, RunEnded, TrajectoryEnded
from rollart.types.trajectory import Outcome

KINDS: tuple[type[Any], ...] = typing.get_args(JournalEvent)


def smallest(kind: type[Any]) -> JournalEvent:
    """The example with everything optional at its default."""
    full = example(kind)
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    event: JournalEvent = kind(**{name: getattr(full, name) for name in required})
    return event


def test_every_event_type_is_part_of_the_journal() -> None:
    classes = inspect.getmembers(journal, inspect.isclass)
    defined = {cls for _, cls in classes if issubclass(cls, Event) and cls is not Event}
    assert set(KINDS) == defined


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json])
def test_an_event_is_read_back_as_it_was_written(kind: type[Any], codec: Any) -> None:
    for event in (example(kind), smallest(kind)):
        back = codec.decode(codec.encode(event), type=JournalEvent)
        assert type(back) is kind
        assert back == event


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_says_what_it_is_and_when(kind: type[Any]) -> None:
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(example(kind)))
    assert written["type"] == kind.__name__
    assert written["at"] == 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_events_do_not_change(kind: type[Any]) -> None:
    with pytest.raises(AttributeError):
        example(kind).at = 1.0  # type: ignore[misc]


def test_defaults_take_no_space() -> None:
    assert msgspec.to_builtins(RunEnded(1.0, 3)) == {"type": "RunEnded", "at": 1.0, "steps": 3}
    ended = TrajectoryEnded(1.0, TrajectoryId(7), Outcome.STALE, 2, 30)
    assert set(msgspec.to_builtins(ended)) == {"type", "at", "trajectory", "outcome", "turns", "sampled"}
