"""Conformance of event sinks: the journal keeps every event once, in order, and `flush` makes them durable.

Cases are coroutines: run each on an event loop (`harness.run(case.run(harness))`).
"""

import asyncio
import enum
import types
import typing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.sink import EventSink
from rollart.types.journal import JournalEvent, StallReported

SUITE = Suite["EventSinkHarness", Coroutine[Any, Any, None]]()
MANY = 25_000
"""More events than a sink would write at once."""


@dataclass(kw_only=True)
class EventSinkHarness:
    """A new sink, and a reader that sees only durable events."""

    build: Callable[[], EventSink]
    """Called once, on the running loop."""
    read_back: Callable[[], list[JournalEvent]]
    """All events that another reader finds now."""
    run: Callable[[Coroutine[Any, Any, None]], None]
    break_it: Callable[[], None] | None = None
    """Make all further writes fail (a full disk, for example)."""


@SUITE.case
async def events_keep_their_order(harness: EventSinkHarness) -> None:
    """After `flush` every appended event is stored, once, in the order of `append`."""
    sink = harness.build()
    events = numbered(0, 100)
    for event in events:
        sink.append(event)
    await sink.flush()
    holds(harness, events)
    await sink.close()


@SUITE.case
async def every_kind_of_event_is_kept(harness: EventSinkHarness) -> None:
    """Every type of journal event is read back as it was appended."""
    sink = harness.build()
    events = [example(kind) for kind in typing.get_args(JournalEvent)]
    for event in events:
        sink.append(event)
    await sink.flush()
    holds(harness, events)
    await sink.close()


@SUITE.case
async def flush_covers_what_came_before(harness: EventSinkHarness) -> None:
    """Each `flush` returns once everything appended so far is durable; events may be appended in between."""
    sink = harness.build()
    events = numbered(0, 30)
    for index, event in enumerate(events):
        sink.append(event)
        if index % 10 == 9:
            await sink.flush()
            holds(harness, events[: index + 1])
    await sink.close()


@SUITE.case
async def flushes_may_overlap(harness: EventSinkHarness) -> None:
    """Several `flush` calls may wait at once, and one with nothing to wait for returns."""
    sink = harness.build()
    await sink.flush()
    events = numbered(0, 50)
    waits = []
    for event in events:
        sink.append(event)
        waits.append(asyncio.ensure_future(sink.flush()))
        await asyncio.sleep(0)
    for wait in waits:
        await wait
    holds(harness, events)
    await sink.flush()
    await sink.close()


@SUITE.case
async def append_never_blocks(harness: EventSinkHarness) -> None:
    """`append` accepts any number of events without the loop running in between; nothing is dropped."""
    sink = harness.build()
    events = numbered(0, MANY)
    for event in events:
        sink.append(event)
    await sink.flush()
    holds(harness, events)
    await sink.close()


@SUITE.case
async def close_flushes(harness: EventSinkHarness) -> None:
    """`close` makes everything durable first."""
    sink = harness.build()
    events = numbered(0, 20)
    for event in events:
        sink.append(event)
    await sink.close()
    holds(harness, events)


@SUITE.case
async def failures_are_raised_by_flush(harness: EventSinkHarness) -> None:
    """A write failure never fails `append`, and is raised by the next `flush`; durable events stay."""
    if harness.break_it is None:
        raise NotApplicable("the harness cannot make writing fail")
    sink = harness.build()
    events = numbered(0, 5)
    for event in events:
        sink.append(event)
    await sink.flush()
    harness.break_it()
    try:
        for event in numbered(5, 10):
            sink.append(event)
            await asyncio.sleep(0)
    except Exception as error:
        raise ConformanceError(f"`append` never fails, but it raised {error!r}") from error
    try:
        await sink.flush()
    except Exception:  # noqa: BLE001  the contract names no type: the failure is the storage's own
        holds(harness, events)
        return
    raise ConformanceError("a write failure is raised by the next `flush`, but it returned")


def holds(harness: EventSinkHarness, events: list[JournalEvent]) -> None:
    """A reader finds exactly these events, in this order."""
    found = harness.read_back()
    check(
        len(found) == len(events),
        f"every appended event is durable after `flush`, each event once: expected {len(events)}, found {len(found)}",
    )
    for index, (got, expected) in enumerate(zip(found, events, strict=True)):
        check(got == expected, f"events keep their order: expected {expected} at {index}, found {got}")


def numbered(start: int, end: int) -> list[JournalEvent]:
    return [StallReported(at=float(index), waits=(f"wait {index}",)) for index in range(start, end)]


def example(kind: type[Any]) -> JournalEvent:
    """An event of this type with a value in every field."""
    hints = typing.get_type_hints(kind)
    event: JournalEvent = kind(**{field.name: _value(hints[field.name]) for field in msgspec.structs.fields(kind)})
    return event


def _value(hint: Any) -> Any:
    """Some value of a type; not the field's default, which a sink might omit."""
    hint = getattr(hint, "__supertype__", hint)
    if hint is Any:
        return [1, {"plain": None}]
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        kept = arguments[:1] * 2 if arguments[-1] is Ellipsis else arguments
        return tuple(_value(argument) for argument in kept)
    if origin is dict:
        return {_value(arguments[0]): _value(arguments[1])}
    if issubclass(hint, enum.Enum):
        return list(hint)[-1]
    if issubclass(hint, msgspec.Struct):
        fields = typing.get_type_hints(hint)
        return hint(**{field.name: _value(fields[field.name]) for field in msgspec.structs.fields(hint)})
    return {bool: True, int: 7, float: 0.1, str: 'läuft "gut"\n'}[hint]


CASES: tuple[Case[EventSinkHarness, Coroutine[Any, Any, None]], ...] = SUITE.cases()
