"""What a reward function sees is decided by its signature; what leaves it open is refused."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rollart
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.ports.factory import load
from rollart.ports.reward import RewardKind, kind_of
from rollart.types.errors import RequestError
from rollart.types.transcript import Transcript

if TYPE_CHECKING:
    import rollart as hidden

ONE, GROUP = RewardKind.TRAJECTORY, RewardKind.GROUP


def bare(t): ...
def named(t: Transcript) -> float: ...
def parts(t: rollart.Transcript) -> dict[str, float]: ...
def only_result(t) -> float: ...
def whole_number(t) -> int: ...
def more(t: Transcript, strict: bool = True) -> float: ...
async def later(t: Transcript) -> float: ...
def text(t: "Transcript") -> "float": ...
def absent(t: "hidden.Transcript") -> float: ...
def absent_group(t: "list[hidden.Transcript]"): ...
def group(group: list[Transcript]) -> list[float]: ...
def sequence(group: Sequence[Transcript]) -> Sequence[float]: ...
def group_of(t: list[Transcript]): ...
def group_by_result(t) -> list[float]: ...
def anything(t: Any) -> list[float]: ...
async def group_later(group: list[Transcript]) -> list[float]: ...


class Held:
    def method(self, t: Transcript) -> float: ...

    def __call__(self, group: list[Transcript]) -> list[float]: ...


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        *((function, ONE) for function in (bare, named, parts, only_result, whole_number, more, later, text, absent)),
        *((function, GROUP) for function in (group, sequence, group_of, group_by_result, anything, group_later)),
        (Held().method, ONE),
        (Held(), GROUP),
    ],
)
def test_the_signature_decides(function: Any, kind: RewardKind) -> None:
    assert kind_of(function, "it") is kind


def test_annotations_for_type_checkers_alone_decide_too() -> None:
    def names(t: "list[Missing]") -> float: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(RequestError, match="neither a Transcript nor a list"):
        kind_of(names, "it")
    assert kind_of(absent_group, "it") is GROUP


def nothing() -> float: ...
def two(t: Transcript, prompt: dict[str, str]) -> float: ...
def keyword(*, t: Transcript) -> float: ...
def plural(group): ...
def crossed(t: Transcript) -> list[float]: ...
def crossed_back(group: list[Transcript]) -> float: ...
def string(answer: str) -> float: ...
def strings(answers: list[str]) -> list[float]: ...


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (nothing, "takes one argument"),
        (two, "takes one argument"),
        (keyword, "takes one argument"),
        (plural, "does not say whether 'group' is one transcript or a group"),
        (crossed, "takes one transcript and returns what is for a group"),
        (crossed_back, "takes a group and returns what is for one transcript"),
        (string, "neither a Transcript nor a list"),
        (strings, "neither a Transcript nor a list"),
        (Held, "is a class"),
        (min, "has no signature"),
    ],
)
def test_what_leaves_it_open_is_refused_with_what_to_write(function: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        kind_of(function, "mine.py:it")
    assert "'mine.py:it'" in str(caught.value)
    assert "(group: list[rollart.Transcript]) -> list[float]" in str(caught.value)


def test_the_examples_of_the_docs_are_of_the_kinds_that_they_say(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    code, tables = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[0] for language in ("python", "toml"))
    (tmp_path / "my_rewards.py").write_text(code)
    kinds = {
        name: kind_of(load(f"{tmp_path / 'my_rewards.py'}:{name}"), name) for name in ("correct", "judged", "shortest")
    }
    assert kinds == {"correct": ONE, "judged": ONE, "shortest": GROUP}
    written = check(RunConfig, tomllib.loads(tables) | {"pools": {"local": {}}})
    assert [reward.label for reward in written.tasks["essay"].all_rewards] == ["correct", "judged", "brevity"]
