"""Run test cases on versions of a module, in a process of its own. Imports nothing of rollart.

    {"cases": [["clamp(5, 0, 3)", "3", ""], …], "sources": ["…", …]}      on standard input
    [[null, "…", …], …]                                                   on standard output: for each source and case,
                                                                          null if it passed, else what it gave

A case is an expression, the expected value as an expression, and the expected error, one of them empty. A case that
uses up its CPU time ends its source: it and all later ones give `TIMEOUT`.
"""

import json
import resource
import signal
import sys
from types import FrameType

TIMEOUT = "no end"
CASE_CPU_S = 0.1
MEMORY_BYTES = 1 << 30
LONGEST = 60


class OutOfTimeError(BaseException):
    """Not an `Exception`, so that code under test does not catch it by accident."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGVTALRM, _out_of_time)
    order = json.load(sys.stdin)
    json.dump([run(source, order["cases"]) for source in order["sources"]], sys.stdout)


def run(source: str, cases: list[tuple[str, str, str]]) -> list[str | None]:
    """What each case gave; None if it passed. A source that is not Python fails all of them."""
    try:
        code = compile(source, "candidate", "exec")
    except (SyntaxError, ValueError) as refused:
        return [type(refused).__name__] * len(cases)
    results: list[str | None] = []
    for expression, expected, error in cases:
        signal.setitimer(signal.ITIMER_VIRTUAL, CASE_CPU_S)
        try:
            # A fresh module for each case, because code may change its own constants.
            module: dict[str, object] = {"__name__": "candidate"}
            exec(code, module)
            gave = eval(expression, module)
            passed = not error and type(gave) is type(eval(expected)) and gave == eval(expected)
            text = repr(gave)
        except OutOfTimeError:
            return [*results, *[TIMEOUT] * (len(cases) - len(results))]
        except Exception as raised:  # noqa: BLE001 - whatever the code under test does is its result
            passed = type(raised).__name__ == error
            text = type(raised).__name__
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        results.append(None if passed else text[:LONGEST])
    return results


def _out_of_time(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's arguments
    raise OutOfTimeError


if __name__ == "__main__":
    main()
