"""Reward functions behind a URL: requests parsed, answers worded, for every target alike; no I/O."""
