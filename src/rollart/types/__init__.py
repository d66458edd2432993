"""Ids, versions, tokens, trajectories, messages, journal events and errors.

The bottom layer: every package may import it, and it imports only stdlib, msgspec and numpy. No clock, no randomness,
no I/O. Import from its modules (`from rollart.types.ids import GroupId`).
"""
