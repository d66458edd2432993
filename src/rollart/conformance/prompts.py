"""Conformance of prompt sources: a resume neither skips nor repeats a prompt."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.prompts import Cursor, PromptSource
from rollart.types.errors import RollartError
from rollart.types.trajectory import Prompt

SUITE = Suite["PromptSourceHarness", None]()


@dataclass(kw_only=True)
class PromptSourceHarness:
    """A source that can be built repeatedly, each time at its beginning."""

    build: Callable[[], PromptSource]
    task: str
    pass_length: int | None = None
    """Prompts per pass; None if the source never repeats."""
    foreign: tuple[Callable[[], PromptSource], ...] = ()
    """Other sources, whose cursors this one must refuse."""


@SUITE.case
def the_stream_is_deterministic(harness: PromptSourceHarness) -> None:
    """Two identically built sources give the same prompts in the same order."""
    count = span(harness)
    same(take(harness.build(), count), take(harness.build(), count), "identically built sources give the same prompts")


@SUITE.case
def the_stream_is_endless(harness: PromptSourceHarness) -> None:
    """There is always a next prompt, even past the end of a data set."""
    check(len(take(harness.build(), 3 * span(harness) + 1)) == 3 * span(harness) + 1, "there is always a next prompt")


@SUITE.case
def prompts_name_their_task(harness: PromptSourceHarness) -> None:
    """Every prompt carries the name of its task."""
    for prompt in take(harness.build(), span(harness)):
        check(prompt.task == harness.task, f"a prompt names its task, {harness.task!r}, but has {prompt.task!r}")


@SUITE.case
def ids_are_unique(harness: PromptSourceHarness) -> None:
    """No id occurs twice within a pass."""
    ids = [prompt.id for prompt in take(harness.build(), span(harness))]
    repeated = sorted({id for id in ids if ids.count(id) > 1})
    check(not repeated, f"an id is unique within its task, but these occurred twice: {repeated}")


@SUITE.case
def an_id_means_one_prompt(harness: PromptSourceHarness) -> None:
    """An id that recurs in a later pass is the same prompt."""
    first: dict[str, Prompt] = {}
    for prompt in take(harness.build(), 2 * span(harness)):
        earlier = first.setdefault(prompt.id, prompt)
        same([earlier], [prompt], f"{prompt.id} always means the same prompt")


@SUITE.case
def prompts_are_serialisable(harness: PromptSourceHarness) -> None:
    """A prompt crosses processes and goes into checkpoints: plain values only."""
    for prompt in take(harness.build(), span(harness)):
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
        same([read], [prompt], "a prompt is read back as it was written")


@SUITE.case
def a_cursor_resumes_without_skip_or_repeat(harness: PromptSourceHarness) -> None:
    """From a cursor, taken anywhere and stored as JSON, a fresh source gives exactly the prompts that follow."""
    count = span(harness)
    expected = take(harness.build(), 2 * count + 2)
    source = harness.build()
    for place in range(count + 2):
        resumed = harness.build()
        resumed.seek(json.loads(json.dumps(source.cursor())))
        same(
            take(resumed, count),
            expected[place : place + count],
            f"a resume after {place} prompts continues with the next",
        )
        source.next()


@SUITE.case
def seek_goes_back_and_forth(harness: PromptSourceHarness) -> None:
    """`seek` works in a source that has moved, backwards and forwards, and the cursor is then the one passed in."""
    expected = take(harness.build(), 6)
    source = harness.build()
    start = source.cursor()
    take(source, 4)
    later = source.cursor()
    take(source, 1)
    source.seek(start)
    check(source.cursor() == start, "after `seek` the source is where the cursor was taken")
    same(take(source, 2), expected[:2], "a source can go back")
    source.seek(later)
    same(take(source, 2), expected[4:6], "a source can go forward")


@SUITE.case
def a_cursor_is_a_value(harness: PromptSourceHarness) -> None:
    """`next` does not change an earlier cursor, and changing a cursor does not move the source."""
    source = harness.build()
    take(source, 2)
    cursor = source.cursor()
    before = copy.deepcopy(cursor)
    expected = take(source, 2)
    check(cursor == before, f"a cursor is a value, but `next` changed it from {before} to {cursor}")
    source.seek(cursor)
    cursor.clear()
    same(take(source, 2), expected, "the source keeps no reference to the cursor it was given")
    mine = source.cursor()
    kept = copy.deepcopy(mine)
    mine.clear()
    check(source.cursor() == kept, "changing a cursor does not move the source")


@SUITE.case
def reading_the_cursor_has_no_effect(harness: PromptSourceHarness) -> None:
    """Only `next` moves the source."""
    source = harness.build()
    check(source.cursor() == source.cursor(), "`cursor` does not move the source")
    same(take(source, 2), take(harness.build(), 2), "`cursor` does not move the source")


@SUITE.case
def a_foreign_cursor_is_refused(harness: PromptSourceHarness) -> None:
    """A cursor of another source, or a malformed one, is refused with a `RollartError`, and the source does
    not move."""
    nonsense: list[Cursor] = [{}, {"nonsense": 1}]
    cursors = nonsense + [advanced(build()).cursor() for build in harness.foreign]
    source = harness.build()
    take(source, 1)
    stands = source.cursor()
    for cursor in cursors:
        try:
            source.seek(cursor)
        except RollartError:
            check(source.cursor() == stands, "a refused cursor leaves the source where it was")
        except Exception as error:
            raise ConformanceError(
                f"a foreign cursor is refused by a RollartError, but {cursor} gave {error!r}"
            ) from error
        else:
            raise ConformanceError(f"a foreign cursor is refused, but {cursor} was accepted")
    if not harness.foreign:
        raise NotApplicable("the harness has no other source; malformed cursors are refused")


def span(harness: PromptSourceHarness) -> int:
    """Number of prompts to look at: one pass, if there are passes."""
    return harness.pass_length or 20


def advanced(source: PromptSource) -> PromptSource:
    source.next()
    return source


def take(source: PromptSource, count: int) -> list[Prompt]:
    return [source.next() for _ in range(count)]


def same(got: list[Prompt], expected: list[Prompt], promise: str) -> None:
    check(
        msgspec.to_builtins(got) == msgspec.to_builtins(expected),
        f"{promise}, but {[prompt.id for prompt in got]} came instead of {[prompt.id for prompt in expected]}",
    )


CASES: tuple[Case[PromptSourceHarness, None], ...] = SUITE.cases()
