"""The Reward port: a stateless function from what an episode left behind to one number."""

from typing import Protocol

from rollart.types.messages import Score


class RewardFunction(Protocol):
    """Worker side; hosted by a reward worker, which speaks `Score`. May block; has a time limit from outside.

    Raising, or answering with anything but a finite number, makes the trajectory `reward_failed`, never a reward of 0.
    """

    def __call__(self, question: Score) -> float: ...
