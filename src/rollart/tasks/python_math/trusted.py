"""Values of programs of this package, in this process. What an agent wrote never comes here: it runs in a sandbox."""

import ast


def value_of(program: str) -> int:
    """Value of the last line, an expression; the lines before are statements.

    >>> value_of("12*30-15"), value_of("n = 2\\nfor k in range(3):\\n    n *= n\\nn")
    (345, 256)
    """
    tree = ast.parse(program)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr), "a program of this package ends with an expression"
    names: dict[str, object] = {}
    exec(compile(tree, "program", "exec"), names)
    return int(eval(compile(ast.Expression(last.value), "program", "eval"), names))
