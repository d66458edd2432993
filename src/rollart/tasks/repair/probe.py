"""Evaluate one expression with a module, in a process of a sandbox, and write the value as text.

    python3 -I -S -c <this file> money "split(100, 3)"  < money.py       value [34,33,33]

`main` is the only part that runs in the sandbox's processes on purpose; `value_text` also runs in the worker, on the
expected values. What is written is compared there as bytes, so nothing of the sandbox is ever decoded. Imports nothing
of rollart.
"""

import os
import resource
import sys

CPU_S = 2
"""Limit of the processor time of one case; the kernel kills the process a second later."""
DEEPEST = 50


def value_text(value: object, depth: int = 0) -> str:
    """Plain data as canonical text: equal texts mean equal values of equal types, whatever `==` may say.

    >>> value_text([True, 1, 1.0, "é", None, (2,), {"b": 1, "a": set()}])
    "[True,1,1.0,'\\\\xe9',None,(2,),{'a':set(),'b':1}]"
    >>> value_text(object())
    Traceback (most recent call last):
    TypeError: object is not plain data
    """
    kind = type(value)
    if depth > DEEPEST:
        raise TypeError("nested too deeply")
    if value is None or kind in (bool, float):
        return repr(value)
    if kind is int:
        return repr(value) if -(10**18) < value < 10**18 else hex(value)  # type: ignore[operator,arg-type]
    if kind in (str, bytes):
        return ascii(value)
    if kind is dict:
        rows = [(value_text(key, depth + 1), value_text(each, depth + 1)) for key, each in value.items()]  # type: ignore[attr-defined]
        return "{" + ",".join(key + ":" + each for key, each in sorted(rows)) + "}"
    if kind in (list, tuple, set, frozenset):
        parts = [value_text(each, depth + 1) for each in value]  # type: ignore[attr-defined]
        if kind is list:
            return "[" + ",".join(parts) + "]"
        if kind is tuple:
            return "(" + "".join(part + "," for part in parts) + ")"
        return kind.__name__ + "(" + ",".join(sorted(parts)) + ")"
    raise TypeError(kind.__name__ + " is not plain data")


def value_line(value: object) -> bytes:
    """What a process writes for a value; what is no plain data is the value of no case."""
    try:
        return ("value " + value_text(value) + "\n").encode()
    except TypeError:
        return b"value that is no plain data\n"


def error_line(name: str) -> bytes:
    """What it writes for an exception."""
    return ("raised " + ascii(name) + "\n").encode()


def main(name: str, expression: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    source = sys.stdin.buffer.read()
    answer = os.dup(1)  # what the module prints goes elsewhere
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    module = type(sys)(name)
    sys.modules[name] = module
    try:
        exec(compile(source, name + ".py", "exec"), module.__dict__)
        value = eval(expression, module.__dict__)
    except BaseException as error:  # noqa: BLE001 - whatever the module does is its result
        line = error_line(type(error).__name__)
    else:
        line = value_line(value)
    while line:
        line = line[os.write(answer, line) :]
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
