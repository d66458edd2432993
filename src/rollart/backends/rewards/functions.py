"""Reward functions that use only the data of the episode."""

from rollart.types.messages import ScoreRequest


def episode_return(question: ScoreRequest) -> float:
    """Sum of the turns' rewards."""
    return float(sum(question.turn_rewards))
