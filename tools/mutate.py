"""Mutation testing of `rollart.policy`: whether the tests notice when a decision is changed.

A mutant is a module with one small change to what it computes or decides:

    a comparison        its neighbour (< to <=) and its opposite (< to >=)       == != is in
    and, or             the other one, and each operand left out                 not left out
    arithmetic          another operator                                         a += b too
    a number, a bool    one more, the other one                                  min for max
    return x            return None                                              break for continue
    if, x if c else y   always, never                                            while never; a filter of a list dropped
    a statement         left out: a call, `del`, a += b, an assignment to an attribute or an item

Declarations and messages are not mutated: annotations, type aliases, decorators, the bases and keywords
of a class, `__slots__`, texts (docstrings included) and what is raised.

A mutant is tried in turn by the tests and worked examples of its own module, by the other tests of `policy` that load
it, and by the worlds of a few fuzz seeds; the first failure kills it. Each stage runs in a fork that has loaded
everything but the policies, and imports the mutant in place of the module. A stage that takes far longer than without
the mutant has found an endless loop, which kills it too. The order of mutants, the tests' examples and the fuzz worlds
are the same in every run.
"""

import argparse
import ast
import enum
import importlib
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple, NoReturn

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "src" / "rollart" / "policy"
TESTS = ROOT / "tests" / "policy"

PRELOADED = (
    *("asyncio", "doctest", "hypothesis.stateful", "numpy", "rich.console", "typer"),
    *("rollart.config.schema", "rollart.observe.audit", "rollart.ports", "rollart.types.journal"),
)
"""What every fork would import again. Nothing here may load a policy."""

FUZZ_SEEDS = range(40)
SURVEY_CPU_LIMIT_S = 300.0
MEMORY_BYTES = 4 << 30
"""An endless loop may append to a list; this is enough for every test."""


# --- mutants --------------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """The node `old` of a module's tree gives way to `new`."""

    module: str
    tree: ast.Module
    line: int
    old: ast.AST
    new: ast.AST

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line}: {_one_line(self.old)}  →  {_one_line(self.new)}"


def _one_line(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitXor: ast.BitOr,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.RShift: ast.LShift,
    ast.LShift: ast.RShift,
}
OPPOSITE = {"min": "max", "max": "min"}


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of the source."""
    tree = ast.parse(source)
    found: dict[tuple[int, str], Mutant] = {}
    for node in _decisions(tree):
        for old, new in _changes(node):
            line: int = getattr(old, "lineno", 0)
            found.setdefault((id(old), ast.dump(new)), Mutant(module, tree, line, old, new))
    return sorted(found.values(), key=lambda mutant: mutant.line)


def _decisions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without declarations and messages."""
    if isinstance(node, ast.Raise) or _is_declaration(node):
        return
    yield node
    skipped = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.ClassDef):
        skipped |= {"bases", "keywords"}
    for name, value in ast.iter_fields(node):
        if name not in skipped:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _decisions(child)


def _is_declaration(node: ast.AST) -> bool:
    """`__slots__`, or a type under another name."""
    match node:
        case ast.Assign(targets=[ast.Name(id="__slots__")]):
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.Subscript() | ast.BinOp(op=ast.BitOr())):
            return not any(isinstance(part, ast.Call | ast.Constant) for part in ast.walk(node.value))
    return False


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.expr():
            for changed in _changed_expression(node):
                yield node, changed
            if isinstance(node, ast.IfExp):
                yield from ((node.test, ast.Constant(value)) for value in (True, False))
        case ast.stmt():
            for statement in _changed_statement(node):
                yield node, statement
            if isinstance(node, ast.If):
                yield node.test, ast.Constant(True)
            if isinstance(node, ast.If | ast.While):
                yield node.test, ast.Constant(False)
        case ast.comprehension(ifs=filters):
            yield from ((kept, ast.Constant(True)) for kept in filters)


def _changed_expression(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, ops, comparators):
            for at, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield ast.Compare(left, [*ops[:at], other(), *ops[at + 1 :]], comparators)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for at in range(len(values)):
                rest = values[:at] + values[at + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, arithmetic, right) if type(arithmetic) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(arithmetic)](), right)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), args, keywords) if name in OPPOSITE:
            yield ast.Call(ast.Name(OPPOSITE[name], ast.Load()), args, keywords)


def _changed_statement(node: ast.stmt) -> Iterator[ast.stmt]:
    match node:
        case ast.AugAssign(target, op, value):
            if type(op) in ARITHMETIC:
                yield ast.AugAssign(target, ARITHMETIC[type(op)](), value)
            yield ast.Pass()
        case ast.Return(ast.Constant(None | bool()) | None):
            pass  # nothing to lose, or mutated as a bool
        case ast.Return():
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets) if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


# --- a mutant in place of its module --------------------------------------------------------------------------------


class _Swap(ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self._mutant.old:
            return self.generic_visit(node)
        return ast.copy_location(self._mutant.new, node)


class _Loader(SourceFileLoader):
    """Loads the tree that it was given instead of the file."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        super().__init__(f"rollart.policy.{module}", str(POLICY / f"{module}.py"))
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002  it has only one
        return compile(self._tree, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the mutant where the module is asked for."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._loader.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._loader.path, loader=self._loader)


def _install(mutant: Mutant) -> None:
    """In the fork only: the tree is changed in place."""
    changed = ast.fix_missing_locations(_Swap(mutant).visit(mutant.tree))
    assert isinstance(changed, ast.Module)
    sys.meta_path.insert(0, _Finder(_Loader(mutant.module, changed)))


# --- stages ---------------------------------------------------------------------------------------------------------


class Fate(enum.Enum):
    """What became of a mutant; the title of its column."""

    OWN = "own tests"
    OTHER = "other tests"
    FUZZ = "fuzz"
    TIME = "time"
    SURVIVED = "survived"


class Stage(NamedTuple):
    """One attempt at a mutant."""

    fate: Fate
    fails: Callable[[], bool]
    cpu_limit_s: float


class Ended(NamedTuple):
    """How a fork ended, and the processor time that it took."""

    failed: bool
    in_time: bool
    cpu_s: float


def _fork(fails: Callable[[], bool], cpu_limit_s: float, mutant: Mutant | None) -> Ended:
    pid = os.fork()
    if pid == 0:
        _run(fails, cpu_limit_s, mutant)
    _, status, usage = os.wait4(pid, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) not in (signal.SIGPROF, signal.SIGALRM):
            raise RuntimeError(f"{mutant} ended by signal {os.WTERMSIG(status)}")
        return Ended(True, False, cpu_s)
    return Ended(os.WEXITSTATUS(status) != 0, True, cpu_s)


def _run(fails: Callable[[], bool], cpu_limit_s: float, mutant: Mutant | None) -> NoReturn:
    status = 1  # whatever is raised here is a failure
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        # Processor time, so that a busy machine kills no mutant; the wall clock is for what hangs and computes nothing.
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        signal.setitimer(signal.ITIMER_REAL, 60 * cpu_limit_s)
        if mutant is not None:
            _install(mutant)
        status = int(fails())
    finally:
        os._exit(status)


def _pytest_fails(files: list[Path]) -> bool:
    """Asserts are plain: to rewrite them pytest would load what it is given from the file, and so never see the mutant.

    Without pytest-timeout, which would take the alarm of the fork.
    """
    options = ["-x", "-q", "--assert=plain", "--doctest-modules", "-o", "addopts="]
    code = pytest.main([*options, "-p", "no:timeout", "-p", "no:cacheprovider", *map(str, files)])
    return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def _fuzz_fails() -> bool:
    check_seed = importlib.import_module("rollart.sim.verdict").check_seed
    return any(check_seed(seed).violations for seed in FUZZ_SEEDS)


class Survey(NamedTuple):
    """What the stages cost without a mutant, and which policies each test file loads."""

    cpu_s: dict[Path, float]
    loads: dict[Path, set[str]]
    fuzz_cpu_s: float


def _survey() -> Survey:
    cpu_s: dict[Path, float] = {}
    loads: dict[Path, set[str]] = {}
    for file in sorted(TESTS.glob("test_*.py")):
        reading, writing = os.pipe()
        cpu_s[file] = _unharmed(file.name, partial(_report_loaded_policies, file, writing))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            loads[file] = set(pipe.read().split())
    return Survey(cpu_s, loads, _unharmed("fuzz", _fuzz_fails))


def _report_loaded_policies(file: Path, writing: int) -> bool:
    failed = _pytest_fails([file])
    os.write(writing, " ".join(name for name in sys.modules if name.startswith("rollart.policy.")).encode())
    return failed


def _unharmed(what: str, fails: Callable[[], bool]) -> float:
    ended = _fork(fails, SURVEY_CPU_LIMIT_S, None)
    if ended.failed:
        raise SystemExit(f"{what} fails without a mutant")
    return ended.cpu_s


def _stages(module: str, survey: Survey) -> list[Stage]:
    """The attempts at the mutants of a module."""
    own = TESTS / f"test_{module}.py"
    other = [file for file, loaded in survey.loads.items() if file != own and f"rollart.policy.{module}" in loaded]
    # The module itself is there for its worked examples.
    files = {Fate.OWN: [file for file in (own, POLICY / f"{module}.py") if file.exists()], Fate.OTHER: other}
    return [
        *(
            Stage(fate, partial(_pytest_fails, found), _limit_s(sum(survey.cpu_s.get(file, 0.0) for file in found)))
            for fate, found in files.items()
            if found
        ),
        Stage(Fate.FUZZ, _fuzz_fails, _limit_s(survey.fuzz_cpu_s)),
    ]


def _limit_s(usual_s: float) -> float:
    return 2 * usual_s + 1.0


def _fate(mutant: Mutant, stages: list[Stage]) -> Fate:
    for stage in stages:
        ended = _fork(stage.fails, stage.cpu_limit_s, mutant)
        if ended.failed:
            return stage.fate if ended.in_time else Fate.TIME
    return Fate.SURVIVED


# --- command line ---------------------------------------------------------------------------------------------------


def _preload() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    for name in PRELOADED:
        importlib.import_module(name)
    early = [name for name in sys.modules if name.startswith("rollart.policy")]
    assert not early, f"loaded before the mutants: {early}"
    hypothesis.settings.register_profile(
        "mutate",
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutate")


def _percent(fates: Counter[Fate]) -> float:
    total = fates.total()
    return 100.0 * (total - fates[Fate.SURVIVED]) / total if total else 100.0


def _table(fates: dict[str, Counter[Fate]]) -> str:
    total: Counter[Fate] = sum(fates.values(), Counter())
    lines = [f"{'module':12}{'mutants':>12}" + "".join(f"{fate.value:>12}" for fate in Fate) + f"{'killed':>12}"]
    for name, row in [*fates.items(), ("total", total)]:
        counts = "".join(f"{row[fate]:12}" for fate in Fate)
        lines.append(f"{name:12}{row.total():12}{counts}{_percent(row):11.1f}%")
    return "\n".join(lines)


def main() -> int:
    modules = sorted(file.stem for file in POLICY.glob("*.py") if file.stem != "__init__")
    parser = argparse.ArgumentParser(description="Mutation testing of rollart.policy; see the top of this file.")
    parser.add_argument("modules", nargs="*", metavar="module", help=f"all by default: {', '.join(modules)}")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, the same ones every time")
    parser.add_argument(
        "--list-survivors", action="store_true", help="each change that nothing noticed, as it is found"
    )
    parser.add_argument("--at-least", type=float, default=80.0, metavar="PERCENT", help="fail below; default 80")
    options = parser.parse_args()
    chosen: list[str] = list(dict.fromkeys(options.modules or modules))
    if unknown := set(chosen) - set(modules):
        parser.error(f"no such policy: {', '.join(sorted(unknown))}; there are {', '.join(modules)}")

    _preload()
    tried = [
        mutant for module in chosen for mutant in mutants(module, (POLICY / f"{module}.py").read_text(encoding="utf-8"))
    ]
    if options.sample is not None:
        kept = random.Random(0).sample(range(len(tried)), min(options.sample, len(tried)))
        tried = [tried[at] for at in sorted(kept)]

    fates: dict[str, Counter[Fate]] = {}
    survey = _survey()
    for module in dict.fromkeys(mutant.module for mutant in tried):
        started = time.monotonic()
        stages = _stages(module, survey)
        fates[module] = Counter()
        for mutant in (mutant for mutant in tried if mutant.module == module):
            fate = _fate(mutant, stages)
            fates[module][fate] += 1
            if fate is Fate.SURVIVED and options.list_survivors:
                sys.stdout.write(f"{mutant}\n")
                sys.stdout.flush()
        sys.stderr.write(
            f"{module}: {fates[module].total()} mutants in {time.monotonic() - started:.0f} s, "
            f"{fates[module][Fate.SURVIVED]} survived\n"
        )
    sys.stdout.write(_table(fates) + "\n")
    return int(_percent(sum(fates.values(), Counter())) < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
