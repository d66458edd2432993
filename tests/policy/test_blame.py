"""When a task is to blame: all of its parts failed, and nothing succeeded in between."""

from rollart.policy.blame import LEAST_FAILURES, Blame


def test_all_parts_must_have_failed() -> None:
    blame = Blame()
    assert [blame.failed("maze", part, parts=4) for part in ("a", "b", "a", "c", "d", "b")] == [False] * 4 + [True] * 2


def test_a_success_of_the_task_clears_it() -> None:
    blame = Blame()
    for part in ("a", "b", "c"):
        blame.failed("maze", part, parts=4)
    blame.succeeded("maze")
    assert not blame.failed("maze", "d", parts=4)


def test_tasks_are_judged_apart() -> None:
    blame = Blame()
    for part in ("a", "b", "c"):
        blame.failed("maze", part, parts=4)
    blame.succeeded("game")
    assert not blame.failed("game", "d", parts=4)
    assert blame.failed("maze", "d", parts=4)


def test_a_single_part_has_a_few_tries() -> None:
    blame = Blame()
    assert [blame.failed("maze", "a", parts=1) for _ in range(LEAST_FAILURES)] == [False, False, True]
