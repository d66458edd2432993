"""Repeat tests in random order, with the cores busy: a hunt for tests that depend on luck.

    make repeat ARGS="tests/ports tests/distributed --times 30 --load"
    make repeat ARGS="tests/ports --seed 123 --times 1"        # the order of one failed round again

Each round is a pytest process of its own with a seed of its own: files in random order, and the tests of each file in
random order. `--load` keeps as many busy processes as there are cores beside them, so that threads and processes are
preempted at unusual places. A round that fails keeps its output, and the summary names its seed and the tests that
failed. Words after `--` go to pytest.

Exit code 0: every round passed; 1: some round failed; 2: the request was wrong.
"""

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SEED = "ROLLART_TEST_ORDER"
"""Environment variable with the seed of a round's order; only the pytest processes of this tool have it."""
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"
"""A process that keeps a core busy for as long as its parent lives."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", re.MULTILINE)


class Round(NamedTuple):
    """One run of the tests."""

    seed: int
    seconds: float
    failed: tuple[str, ...]
    """Tests that failed; empty, too, if pytest itself did."""
    code: int
    """Exit code of pytest."""
    output: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeat tests; see the module."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    mine, extra = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    given = parser().parse_args(mine)
    if missing := [path for path in given.paths if not Path(path.partition("::")[0]).exists()]:
        say(f"no such tests: {' '.join(missing)}")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="repeat-tests-"))
    first = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    say(f"{given.times} × {' '.join(given.paths)}, first seed {first}, output in {folder}")
    rounds: list[Round] = []
    with busy_cores((os.cpu_count() or 1) if given.load else 0):
        for seed in range(first, first + given.times):
            rounds.append(run_round(given.paths, seed, extra, folder))
            say(describe(rounds[-1]))
            if rounds[-1].code and given.stop:
                break
    say(summary(rounds))
    return 1 if any(done.code for done in rounds) else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("paths", nargs="+", help="folders, files or ids of tests, as pytest takes them")
    made.add_argument("--times", type=int, default=10, help="number of rounds (default 10)")
    made.add_argument("--seed", type=int, help="seed of the first round's order; the next rounds count up from it")
    made.add_argument("--load", action="store_true", help="keep all cores busy meanwhile")
    made.add_argument("--stop", action="store_true", help="stop after the first round that fails")
    return made


def run_round(paths: Sequence[str], seed: int, extra: Sequence[str], folder: Path) -> Round:
    """Run the tests once, in the order of `seed`."""
    output = folder / f"{seed}.txt"
    mine = Path(__file__)
    path = os.pathsep.join(filter(None, (str(mine.absolute().parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, SEED: str(seed), "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", mine.stem, "-p", "no:cacheprovider", "-rfE", *extra, *paths]
    began = time.monotonic()
    with output.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    failed = tuple(dict.fromkeys(FAILED.findall(output.read_text(encoding="utf-8")))) if done.returncode else ()
    return Round(seed, time.monotonic() - began, failed, done.returncode, output)


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep cores busy inside the block."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def describe(done: Round) -> str:
    if not done.code:
        return f"seed {done.seed}: passed in {done.seconds:.0f} s"
    return "\n  ".join([f"seed {done.seed}: FAILED in {done.seconds:.0f} s, see {done.output}", *done.failed])


def summary(rounds: Sequence[Round]) -> str:
    """How many rounds passed, and which tests failed how often, with the seeds to try again."""
    bad = [done for done in rounds if done.code]
    lines = [f"{len(rounds) - len(bad)} of {len(rounds)} rounds passed"]
    counts = Counter(test for done in bad for test in done.failed)
    for test, count in counts.most_common():
        seeds = ", ".join(str(done.seed) for done in bad if test in done.failed)
        lines.append(f"  {count} × {test} (seeds {seeds})")
    lines += [f"  pytest ended with {done.code} (seed {done.seed})" for done in bad if not done.failed]
    return "\n".join(lines)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The plugin that each round loads: it shuffles files, and tests within their file.

    A file stays together, so that a fixture of a module is made once.
    """
    chance = random.Random(os.environ[SEED])
    files: dict[str, list[Any]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    for tests in files.values():
        chance.shuffle(tests)
    order = list(files)
    chance.shuffle(order)
    items[:] = [item for file in order for item in files[file]]


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - its output


if __name__ == "__main__":
    sys.exit(main())
