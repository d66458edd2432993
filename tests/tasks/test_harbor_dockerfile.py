"""Dockerfiles: what is read, and what is refused by name and line."""

import pytest

from rollart.tasks.harbor.dockerfile import Copy, DockerfileRefused, Env, Run, User, Workdir, expanded, parse


def test_what_is_supported() -> None:
    file = parse(
        "# syntax=docker/dockerfile:1\nFROM python:3.11-slim AS base\n\n  # a comment\nrun echo a && \\\n"
        "    # between continued lines\n\n    echo b\n"
        'RUN ["echo", "c d"]\nCOPY a b c/\nCOPY ["a b", "c/"]\nWORKDIR  /app\n'
        "ENV A=1 B=\"x y\" C='$A' D=e\\ f\nENV OLD the old form\nUSER agent:users"
    )
    assert file.image == "python:3.11-slim"
    run, *others = file.steps
    assert isinstance(run, Run)
    assert run.line == 5
    assert run.command[:2] == ("/bin/sh", "-c")
    assert run.command[2].split() == ["echo", "a", "&&", "echo", "b"]
    assert others == [
        Run(9, ("echo", "c d")),
        Copy(10, ("a", "b"), "c/"),
        Copy(11, ("a b",), "c/"),
        Workdir(12, "/app"),
        Env(13, (("A", "1"), ("B", '"x y"'), ("C", "'$A'"), ("D", "e\\ f"))),
        Env(14, (("OLD", "the old form"),)),
        User(15, "agent:users"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM debian\nEXPOSE 80", "line 2: EXPOSE is not supported"),
        ("FROM debian\n\n# x\nENTRYPOINT a", "line 4: ENTRYPOINT is not supported"),
        ("FROM debian\nADD a b", "line 2: ADD is not supported"),
        ("ARG A\nFROM debian", "line 1: ARG is not supported"),
        ("FROM debian\nWORKDR /app", "did you mean WORKDIR"),
        ("RUN true", "line 1: RUN stands before FROM"),
        ("FROM debian\nFROM python", "line 2: a second FROM"),
        ("FROM --platform=linux/amd64 debian", "line 1: FROM --platform is not supported"),
        ("FROM $IMAGE", "line 1: variables in FROM"),
        ("FROM debian\nCOPY --from=x a b", "line 2: COPY --from is not supported"),
        ("FROM debian\nRUN --mount=type=cache,target=/x a", "line 2: RUN --mount is not supported"),
        ("FROM debian\nRUN cat <<EOF > x\nhello\nEOF", "line 2: RUN with a here-document"),
        ("FROM debian\nCOPY a", "line 2: COPY needs a source and a target"),
        ("FROM debian\nRUN []", "line 2: a list in brackets"),
        ("FROM debian\nENV A", "line 2: ENV 'A' has no value"),
        ("FROM debian\nRUN", "line 2: RUN has no arguments"),
        ("# escape=`\nFROM debian", "line 1: another escape character"),
        ("", "there is no FROM"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(DockerfileRefused, match="line") as refused:
        parse(text)
    assert said in str(refused.value)


def test_tabs_are_kept() -> None:
    file = parse("FROM\tdebian\nRUN\tprintf 'all:\ttrue' \\\n\t> Makefile\nENV\tOLD\tthe form")
    assert file.steps == (
        Run(2, ("/bin/sh", "-c", "printf 'all:\ttrue' \t> Makefile")),
        Env(4, (("OLD", "the form"),)),
    )


def test_a_shell_may_shift_and_read_strings() -> None:
    assert len(parse("FROM debian\nRUN cat <<< word; echo $((1<<3))").steps) == 1


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A", "a"),
        ("${A}b", "ab"),
        ("$B", ""),
        ("${B:-$A/x}", "a/x"),
        ("${A:+yes}${B:+no}", "yes"),
        ("\\$A", "$A"),
        ("'$A'", "$A"),
        ('"$A \\"q\\" c"', 'a "q" c'),
        ("e\\ f", "e f"),
    ],
)
def test_variables_and_quotes(word: str, value: str) -> None:
    assert expanded(word, {"A": "a"}) == value
