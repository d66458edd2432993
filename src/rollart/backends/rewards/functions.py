"""Reward functions that need nothing but what the episode left behind."""

from rollart.types.messages import Score


def episode_return(question: Score) -> float:
    """The sum of the turns' rewards."""
    return float(sum(question.turn_rewards))
