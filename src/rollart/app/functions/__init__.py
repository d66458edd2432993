"""Servers of reward functions: one core, and the targets that run it."""
