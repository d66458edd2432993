"""Ids, versions, tokens, trajectories, messages, journal events and errors.

Everything in the project points at this package and it points at nothing: stdlib, msgspec and numpy only, no clock, no
randomness, no I/O. Import from its modules (`from rollart.types.ids import GroupId`).
"""
