"""Scripted customers. They know what a customer knows: the sentence and the pages seen so far."""

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from rollart.tasks.shop.environment import BACK, BUY, FEATURES, NEXT
from rollart.tasks.shop.goals import Goal, read_sentence

_ROW = re.compile(r"(p\d+) (.+) \$(\d+)")
_HASTE = 0.5


class Row(NamedTuple):
    """A product as the results show it."""

    id: str
    title: frozenset[str]
    price: int


class Page(NamedTuple):
    """A page as text. A page of a product has its row alone."""

    rows: tuple[Row, ...]
    buttons: frozenset[str]
    features: frozenset[str]
    """Attributes in the title or among the features."""
    offered: frozenset[str]
    chosen: frozenset[str]

    @property
    def is_product(self) -> bool:
        return BUY in self.buttons


def read_page(text: str) -> Page:
    rows: list[Row] = []
    words: dict[str, list[str]] = {}
    for line in text.splitlines():
        if found := _ROW.fullmatch(line):
            rows.append(Row(found[1], frozenset(found[2].split()), int(found[3])))
        elif ": " in line:
            axis, _, values = line.partition(": ")
            words[axis] = values.split()
    features = {*words.pop(FEATURES, ()), *(rows[0].title if rows else ())}
    offered = [value for some in words.values() for value in some]
    return Page(
        tuple(rows),
        frozenset(re.findall(r"\[(\w+)\]", text)),
        frozenset(features),
        frozenset(value.rstrip("*") for value in offered),
        frozenset(value.rstrip("*") for value in offered if value.endswith("*")),
    )


def anything(observations: Sequence[str], chance: random.Random) -> str:
    """Search for a random word of the goal, then click anything."""
    page = read_page(observations[-1])
    if not page.rows:
        return f"search[{chance.choice(_query(_goal(observations)).split())}]"
    names = sorted(page.offered | page.buttons) if page.is_product else [row.id for row in page.rows]
    return f"click[{chance.choice(names + sorted(page.buttons))}]"


def first_result(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    """Search for the kind alone, and buy the first result as it is."""
    page = read_page(observations[-1])
    if page.is_product:
        return f"click[{BUY}]"
    return f"click[{page.rows[0].id}]" if page.rows else f"search[{_goal(observations).kind}]"


def hasty(observations: Sequence[str], chance: random.Random) -> str:
    """Buy any result of the first page; choose the options half of the time."""
    page = read_page(observations[-1])
    if page.is_product:
        missing = _missing(page, _goal(observations))
        return f"click[{missing[0] if missing and chance.random() < _HASTE else BUY}]"
    return f"click[{chance.choice(page.rows).id}]" if page.rows else f"search[{_query(_goal(observations))}]"


def careful(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    """Buy the first result within the limit, with its options, without another look."""
    goal = _goal(observations)
    page = read_page(observations[-1])
    if page.is_product:
        missing = _missing(page, goal)
        return f"click[{missing[0] if missing else BUY}]"
    if not page.rows:
        return f"search[{_query(goal)}]"
    fitting = [row for row in page.rows if row.price <= goal.limit and row.title.issuperset(goal.kind.split())]
    return f"click[{(fitting or page.rows)[0].id}]"


def thorough(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    """Look at one result after the other, on all pages, until one has everything."""
    goal = _goal(observations)
    page = read_page(observations[-1])
    if page.is_product:
        if not page.features.issuperset(goal.attributes) or not page.offered.issuperset(goal.options.values()):
            return f"click[{BACK}]"
        missing = _missing(page, goal)
        return f"click[{missing[0] if missing else BUY}]"
    if not page.rows:
        return f"search[{_query(goal)}]"
    seen = {each.rows[0].id for each in map(read_page, observations) if each.is_product}
    for row in page.rows:
        if row.id not in seen and row.price <= goal.limit and row.title.issuperset(goal.kind.split()):
            return f"click[{row.id}]"
    return f"click[{NEXT if NEXT in page.buttons else page.rows[0].id}]"


def _goal(observations: Sequence[str]) -> Goal:
    return read_sentence(observations[0].splitlines()[-1])


def _query(goal: Goal) -> str:
    return " ".join([*goal.attributes, goal.kind, *goal.options.values()])


def _missing(page: Page, goal: Goal) -> list[str]:
    """Wanted options that the page offers and that are not chosen yet."""
    return [value for value in goal.options.values() if value in page.offered - page.chosen]
