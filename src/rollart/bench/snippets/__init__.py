"""The same dataset and reward, written for rollart and for TRL: scripts that `rollart bench trl` runs and counts.

Each is a program of its own, as a user would write it: `python SCRIPT MODEL ROWS STEPS OUT`.
"""
