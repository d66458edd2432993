"""Reward functions that use only the data of the episode."""

from rollart.types.transcript import Transcript


def episode_return(t: Transcript) -> float:
    """Sum of the turns' rewards."""
    return t.earned
