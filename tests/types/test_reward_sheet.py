"""The sheet on which the rewards of a trajectory are entered."""

import math

import pytest

from rollart.types.errors import InvariantBroken
from rollart.types.rewards import RewardRule, RewardSheet, is_plain, total

RULES = (RewardRule("own", weight=2.0), RewardRule("style", weight=-0.5, default=1.0), RewardRule("best", group=True))


def test_the_total_is_the_weighted_sum() -> None:
    sheet = RewardSheet(RULES)
    sheet.enter("own", 1.5)
    sheet.enter("style", 4.0, defaulted=True)
    assert sheet.missing(group=False) == []
    assert sheet.missing(group=True) == ["best"]
    sheet.enter("best", 0.25)
    assert sheet.total() == 2 * 1.5 - 0.5 * 4.0 + 0.25
    assert sheet.defaulted == ["style"]


def test_a_reward_is_entered_once_and_only_if_it_is_one_of_the_task() -> None:
    sheet = RewardSheet(RULES)
    sheet.enter("own", 1.0)
    for name in ("own", "unknown"):
        with pytest.raises(InvariantBroken, match=name):
            sheet.enter(name, 1.0)


def test_a_sum_that_overflows_is_no_number() -> None:
    rules = (RewardRule("one", weight=1e308), RewardRule("other", weight=-1e308))
    assert not math.isfinite(total(rules, {"one": 1e308, "other": 1e308}))


@pytest.mark.parametrize(
    ("rules", "plain"),
    [
        ((RewardRule("own"),), True),
        ((RewardRule("own", deadline_s=3.0, transcript=False),), True),
        ((RewardRule("own", weight=2.0),), False),
        ((RewardRule("own", group=True),), False),
        ((RewardRule("own", default=0.0),), False),
        ((RewardRule("own"), RewardRule("other")), False),
    ],
)
def test_a_plain_reward_is_one_number_of_one_function(rules: tuple[RewardRule, ...], plain: bool) -> None:
    assert is_plain(rules) is plain
