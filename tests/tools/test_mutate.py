"""What counts as a mutant."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "mutate.py"


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["mutate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a is b", ["a is not b"]),
        ("a < b == c", ["a <= b == c", "a >= b == c", "a < b != c"]),
        ("a and b", ["a or b", "b", "a"]),
        ("a and b and c", ["a or b or c", "b and c", "a and c", "a and b"]),
        ("not a", ["a"]),
        ("a + b", ["a - b"]),
        ("max(a, b)", ["pass", "min(a, b)"]),
        ("a += b", ["a -= b", "pass"]),
        ("a.b = c", ["pass"]),
        ("a = c", []),
        ("del a[b]", ["pass"]),
        ("a = 1", ["2"]),
        ("a = True", ["False"]),
        ("a = 'text'", []),
        ("b if a else c", ["True", "False"]),
        ("if a: b", ["True", "False"]),
        ("while a: b", ["False"]),
        ("while True: b", ["False"]),
        ("[a for a in b if c]", ["True"]),
        ("def f(): return a", ["return None"]),
        ("def f(): return True", ["False"]),
        ("def f(): return", []),
        ("for a in b: break", ["continue"]),
    ],
)
def test_one_small_change_makes_a_mutant(mutate: ModuleType, source: str, changed: list[str]) -> None:
    assert [str(mutant).partition("  →  ")[2] for mutant in mutate.mutants("m", source)] == changed


@pytest.mark.parametrize(
    "source",
    [
        "def f(a: A[1] | B) -> A[1] | B: 'text'",
        "a: A | B",
        "Alias = A[B] | C",
        "class A(B[1], frozen=True): __slots__ = ('a', *b[1:])",
        "@decorated(slots=True)\ndef f(): ...",
        "raise Broken(f'{a + 1} of {b}')",
    ],
)
def test_what_declares_or_says_something_is_left_alone(mutate: ModuleType, source: str) -> None:
    assert mutate.mutants("m", source) == []


def test_mutants_come_in_the_order_of_the_source_and_say_where_they_are(mutate: ModuleType) -> None:
    found = mutate.mutants("shares", "if a:\n    b = c < d\nreturn_ = 1\n")
    assert [str(mutant) for mutant in found] == [
        "shares.py:1: a  →  True",
        "shares.py:1: a  →  False",
        "shares.py:2: c < d  →  c <= d",
        "shares.py:2: c < d  →  c >= d",
        "shares.py:3: 1  →  2",
    ]
