"""Bugs as edits of lines, found by walking the syntax tree of a module.

An edit replaces whole lines, so that it can be shown, applied and undone as text; everything else in the file stays as
it was written. The list of mutations depends on the source alone.
"""

import ast
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Kind(StrEnum):
    """What is wrong. In the order of `GRADES`, from what a look at one line shows to what is not there to be seen."""

    COMPARISON = "comparison"
    """`<` instead of `<=`, `==` instead of `!=`."""
    OPERATOR = "operator"
    """`+` instead of `-`, `//` instead of `%`."""
    CONSTANT = "constant"
    """A whole number that is one too large or too small."""
    LOGIC = "logic"
    """`and` instead of `or`, a `not` too few, `True` instead of `False`."""
    VARIABLE = "variable"
    """Another variable of the same function."""
    CALL = "call"
    """`min` instead of `max`, or two arguments swapped."""
    BRANCH = "branch"
    """A missing `if`, `elif` or `else`."""
    STATEMENT = "statement"
    """A missing statement."""


GRADES: Mapping[Kind, int] = {
    Kind.COMPARISON: 1, Kind.OPERATOR: 1, Kind.CONSTANT: 1,
    Kind.LOGIC: 2, Kind.VARIABLE: 2, Kind.CALL: 2,
    Kind.BRANCH: 3, Kind.STATEMENT: 3,
}  # fmt: skip
COMPARISONS = {
    "<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="),
    "==": ("!=",), "!=": ("==",), "in": ("not in",), "not in": ("in",), "is": ("is not",), "is not": ("is",),
}  # fmt: skip
OPERATORS = {"+": ("-",), "-": ("+",), "*": ("+",), "//": ("%",), "%": ("//",), "/": ("//",)}
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any"}
MOST_VARIABLES = 2
"""Replacements tried for each use of a variable."""


class Edit(NamedTuple):
    """Replace the lines `old`, of which the first has number `first`, by `new`.

    >>> edit = Edit(2, ("b",), ())
    >>> edit.apply("a\\nb\\nc\\n"), edit.inverse().apply("a\\nc\\n")
    ('a\\nc\\n', 'a\\nb\\nc\\n')
    """

    first: int
    old: tuple[str, ...]
    new: tuple[str, ...]

    def apply(self, source: str) -> str:
        lines = source.splitlines()
        start = self.first - 1
        if tuple(lines[start : start + len(self.old)]) != self.old:
            raise ValueError(f"line {self.first} is not {self.old}")
        lines[start : start + len(self.old)] = self.new
        return "\n".join(lines) + "\n"

    def inverse(self) -> "Edit":
        return Edit(self.first, self.new, self.old)


class Mutation(NamedTuple):
    kind: Kind
    function: str
    edit: Edit


def mutations(source: str) -> tuple[Mutation, ...]:
    """All mutations of the functions of a module, each once."""
    lines = source.splitlines()
    found: dict[Edit, Mutation] = {}
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            for kind, edit in _Finder(lines, function).edits():
                if edit.old != edit.new:
                    found.setdefault(edit, Mutation(kind, function.name, edit))
    return tuple(found.values())


class _Finder:
    """Edits of one function."""

    def __init__(self, lines: list[str], function: ast.FunctionDef) -> None:
        self._lines = lines
        self._function = function
        stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        names = [*(argument.arg for argument in function.args.args), *(name.id for name in stored)]
        self._variables = list(dict.fromkeys(names))

    def edits(self) -> Iterator[tuple[Kind, Edit]]:
        for statement in self._function.body:
            for node in ast.walk(statement):
                yield from self._of_expression(node)
                yield from self._of_blocks(node)
        yield from self._of_blocks(self._function)

    def _of_expression(self, node: ast.AST) -> Iterator[tuple[Kind, Edit]]:
        match node:
            case ast.Compare(left=left, comparators=others):
                for one, other in pairwise([left, *others]):
                    yield from self._signs(Kind.COMPARISON, one, other, COMPARISONS)
            case ast.BinOp(left=left, right=right):
                yield from self._signs(Kind.OPERATOR, left, right, OPERATORS)
            case ast.AugAssign(target=target, value=value):
                yield from self._signs(
                    Kind.OPERATOR, target, value, {f"{a}=": (f"{b[0]}=",) for a, b in OPERATORS.items()}
                )
            case ast.BoolOp(values=values):
                for one, other in pairwise(values):
                    yield from self._signs(Kind.LOGIC, one, other, {"and": ("or",), "or": ("and",)})
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from self._replaced(Kind.LOGIC, node, self._text(operand))
            case ast.Constant(value=bool(truth)):
                yield from self._replaced(Kind.LOGIC, node, str(not truth))
            case ast.Constant(value=int(number)):
                for wrong in (number + 1, number - 1):
                    yield from self._replaced(Kind.CONSTANT, node, str(wrong))
            case ast.Name(id=name, ctx=ast.Load()) if name in self._variables:
                place = self._variables.index(name)
                for wrong_name in [*self._variables[place + 1 :], *self._variables[:place]][:MOST_VARIABLES]:
                    yield from self._replaced(Kind.VARIABLE, node, wrong_name)
            case ast.Call(func=ast.Name(id=name) as function) if name in EXCHANGED:
                yield from self._replaced(Kind.CALL, function, EXCHANGED[name])
            case ast.Call(args=[one, other], keywords=[]):
                yield from self._swapped(one, other)

    def _of_blocks(self, node: ast.AST) -> Iterator[tuple[Kind, Edit]]:
        """Statements and branches left out. A block is never left empty, and a docstring stays."""
        if isinstance(node, ast.If) and node.orelse:
            assert node.end_lineno is not None
            yield Kind.BRANCH, self._cut((node.body[-1].end_lineno or 0) + 1, node.end_lineno)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list) or len(block) < 2:
                continue
            for statement in block:
                last = statement.end_lineno or statement.lineno
                if isinstance(statement, ast.If) and not statement.orelse:
                    yield Kind.BRANCH, self._cut(statement.lineno, last)
                elif isinstance(statement, ast.AugAssign | ast.Break | ast.Continue) or _is_call(statement):
                    yield Kind.STATEMENT, self._cut(statement.lineno, last)

    def _cut(self, first: int, last: int) -> Edit:
        return Edit(first, tuple(self._lines[first - 1 : last]), ())

    def _text(self, node: ast.expr) -> str:
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset]

    def _replaced(self, kind: Kind, node: ast.AST, text: str) -> Iterator[tuple[Kind, Edit]]:
        """An expression replaced by text, if it is on one line."""
        if isinstance(node, ast.expr) and node.lineno == node.end_lineno:
            line = self._lines[node.lineno - 1]
            yield kind, Edit(node.lineno, (line,), (line[: node.col_offset] + text + line[node.end_col_offset :],))

    def _signs(
        self, kind: Kind, one: ast.expr, other: ast.expr, signs: Mapping[str, tuple[str, ...]]
    ) -> Iterator[tuple[Kind, Edit]]:
        """The sign between two operands replaced, if nothing else is between them."""
        if one.end_lineno != other.lineno:
            return
        line = self._lines[other.lineno - 1]
        between = line[one.end_col_offset : other.col_offset]
        for sign in signs.get(between.strip(), ()):
            changed = line[: one.end_col_offset] + between.replace(between.strip(), sign) + line[other.col_offset :]
            yield kind, Edit(other.lineno, (line,), (changed,))

    def _swapped(self, one: ast.expr, other: ast.expr) -> Iterator[tuple[Kind, Edit]]:
        if one.lineno != other.end_lineno:
            return
        line = self._lines[one.lineno - 1]
        between = line[one.end_col_offset : other.col_offset]
        swapped = self._text(other) + between + self._text(one)
        yield Kind.CALL, Edit(one.lineno, (line,), (line[: one.col_offset] + swapped + line[other.end_col_offset :],))


def _is_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
