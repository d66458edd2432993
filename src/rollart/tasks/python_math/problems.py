"""Word problems whose arithmetic is beyond the head: a text with numbers, and the Python that computes the answer.

| level | numbers | a program is |
|---|---|---|
| 1 | three of two digits; the result has three | one line with two operations |
| 2 | four to seven of up to four digits | one line with several operations |
| 3 | two to four; results that need a loop or a large power | one or a few lines |

Invariant: the text alone determines the program (`program_for`), so a script sees no more than an agent does.
"""

import random
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from rollart.tasks.python_math.trusted import value_of
from rollart.types.errors import RequestError

THINGS = ("pens", "eggs", "nails", "cups")
BOXES = ("boxes", "bags", "crates")
_FIELD = re.compile(r"\\\{(\w+)\\\}")
MOST_DRAWS = 10_000


class Kind:
    """A family of problems. `{0}`, `{1}`, … are numbers of the given ranges; `{thing}` and `{box}` are nouns."""

    def __init__(self, text: str, program: str, *ranges: tuple[int, int]) -> None:
        self.text, self.program, self.ranges = text, program, ranges

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the texts of this kind, with their numbers as groups `n0`, `n1`, …"""
        seen: set[str] = set()

        def group(field: re.Match[str]) -> str:
            name = f"n{field[1]}"
            if name in seen:
                return f"(?P={name})"
            seen.add(name)
            inside = r"\d+" if field[1].isdigit() else "[a-z]+"
            return f"(?P<{name}>{inside})"

        return re.compile(_FIELD.sub(group, re.escape(self.text)))

    def numbers(self, text: str) -> list[int] | None:
        """The numbers of a problem; None if it is of another kind."""
        found = self.pattern.search(text)
        return [int(found[f"n{index}"]) for index in range(len(self.ranges))] if found else None


class Problem(NamedTuple):
    text: str
    result: int


class Level(NamedTuple):
    kinds: Sequence[Kind]
    smallest: int
    largest: int
    """Bounds of the result."""


def _ann(text: str, program: str) -> Kind:
    return Kind(f"Ann has {text} How many {{thing}}?", program, *((10, 99),) * 3)


LEVELS = {
    1: Level(
        (
            _ann("{0} {box} of {1} {thing} and loses {2} {thing}.", "{0}*{1}-{2}"),
            _ann("{0} {box} of {1} {thing} and finds {2} {thing}.", "{0}*{1}+{2}"),
            _ann("{0} {thing} and buys {1} {box} of {2} {thing}.", "{0}+{1}*{2}"),
            _ann("{0} {box} and loses {1} {box}. Each has {2} {thing}.", "({0}-{1})*{2}"),
            _ann("{0} {box} and finds {1} {box}. Each has {2} {thing}.", "({0}+{1})*{2}"),
        ),
        100,
        999,
    ),
    2: Level(
        (
            Kind(
                "A farm packs {0} crates with {1} trays of {2} eggs each. {3} trays are dropped, and in every "
                "other tray {4} eggs are bad. How many good eggs are left?",
                "({0}*{1}-{3})*({2}-{4})",
                (20, 400), (12, 90), (18, 48), (11, 200), (2, 9),
            ),
            Kind(
                "A shop sells {0} shirts at {1} dollars and {2} coats at {3} dollars. It had paid {4} dollars for a "
                "shirt and {5} dollars for a coat, and pays {6} dollars of rent. How many dollars does it earn?",
                "{0}*({1}-{4})+{2}*({3}-{5})-{6}",
                (120, 900), (21, 60), (40, 400), (90, 300), (5, 20), (30, 80), (500, 4000),
            ),
            Kind(
                "{0} friends share the price of {1} tickets at {2} dollars and {3} meals at {4} dollars. Everybody "
                "pays the same whole number of dollars, and Ann pays what is missing. How many dollars is that?",
                "({1}*{2}+{3}*{4})%{0}",
                (13, 97), (101, 900), (17, 130), (101, 900), (11, 80),
            ),
            Kind(
                "A tank holds {0} litres. {1} pumps add {2} litres per hour each, and a leak loses {3} litres per "
                "hour. How many litres does it hold after {4} hours?",
                "{0}+({1}*{2}-{3})*{4}",
                (1000, 9000), (3, 19), (120, 900), (20, 300), (12, 96),
            ),
            Kind(
                "A printer makes {0} pages per minute and stops for {1} minutes after every {2} pages. How many whole "
                "minutes have passed when it has made {3} pages?",
                "{3}//{0}+({3}-1)//{2}*{1}",
                (20, 90), (2, 9), (300, 900), (5000, 60000),
            ),
        ),
        10,
        10_000_000,
    ),
    3: Level(
        (
            Kind(
                "How many whole numbers from 1 to {0} can be divided by {1} or by {2}, but not by {3}?",
                "sum((n % {1} == 0 or n % {2} == 0) and n % {3} != 0 for n in range(1, {0} + 1))",
                (3000, 20000), (3, 19), (20, 49), (5, 60),
            ),
            Kind(
                "What is the sum of the decimal digits of {0} to the power of {1}?",
                "sum(map(int, str({0} ** {1})))",
                (7, 99), (20, 120),
            ),
            Kind(
                "What is the remainder of {0} to the power of {1} when it is divided by {2}?",
                "pow({0}, {1}, {2})",
                (12, 999), (1000, 99999), (1009, 99991),
            ),
            Kind(
                "A fund of {0} dollars grows by {1} percent every year, rounded down to whole dollars. How many "
                "dollars does it hold after {2} years?",
                "fund = {0}\nfor year in range({2}):\n    fund += fund * {1} // 100\nfund",
                (1000, 99999), (2, 9), (11, 40),
            ),
            Kind(
                "In how many ways can {0} cents be paid with coins of {1}, {2} and {3} cents?",
                "sum(({0} - {2}*b - {3}*c) % {1} == 0\n"
                "    for c in range({0}//{3} + 1)\n"
                "    for b in range(({0} - {3}*c)//{2} + 1))",
                (200, 900), (2, 5), (6, 12), (13, 30),
            ),
            Kind(
                "How many prime numbers are larger than {0} and smaller than {1}?",
                "sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range({0} + 1, {1}))",
                (1000, 3000), (3100, 6000),
            ),
        ),
        2,
        10_000_000,
    ),
}  # fmt: skip


def draw_problem(level: int, seed: int) -> str:
    """The text of a problem; the same seed gives the same."""
    kinds, smallest, largest = LEVELS[level]
    chance = random.Random(seed)
    kind = chance.choice(kinds)
    for _ in range(MOST_DRAWS):
        numbers = [chance.randint(*bounds) for bounds in kind.ranges]
        if smallest <= value_of(kind.program.format(*numbers)) <= largest:
            return kind.text.format(*numbers, thing=chance.choice(THINGS), box=chance.choice(BOXES))
    raise RequestError(f"{MOST_DRAWS} draws gave no problem like {kind.text!r}")


@lru_cache(maxsize=4096)
def solved(text: str) -> Problem:
    """The problem in a text, with its result; raises `RequestError` if it is of no known kind."""
    return Problem(text, value_of(program_for(text)))


def program_for(text: str) -> str:
    """The program that computes the answer.

    >>> program_for("Ann has 12 bags of 30 pens and loses 15 pens. How many pens?")
    '12*30-15'
    """
    for kind, numbers in matching(text):
        return kind.program.format(*numbers)
    raise RequestError(f"{text!r} is no problem of the levels 1 to {len(LEVELS)}")


def matching(text: str) -> list[tuple[Kind, list[int]]]:
    """The kind of a problem and its numbers; empty if it is of no known kind."""
    kinds = [kind for level in LEVELS.values() for kind in level.kinds]
    return [(kind, numbers) for kind in kinds if (numbers := kind.numbers(text)) is not None]
