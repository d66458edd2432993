"""The Reward port: a stateless function from the record of an episode to a number."""

from typing import Protocol

from rollart.types.messages import ScoreRequest


class RewardFunction(Protocol):
    """Hosted by a reward worker, which handles `ScoreRequest`. May block; the time limit is enforced from outside.

    An exception, or a result that is not a finite number, makes the trajectory `reward_failed`, never a reward of 0.
    """

    def __call__(self, question: ScoreRequest) -> float: ...
