"""Seeds derived from what is sampled, not when: a given turn of a prompt's member has the same seed in every mode.

The control plane derives its random numbers from the run's seed and the name of their purpose, so that a run in virtual
time has the same journal in every process.
"""

import hashlib

_MASK = (1 << 64) - 1


def member_key(run: int, prompt: int, member: int) -> int:
    """Key from which the seeds of all turns of one member of one prompt are derived."""
    return _mix(_mix(run & _MASK, prompt), member)


def turn_seed(key: int, turn: int) -> int:
    """63-bit seed of one turn."""
    return _mix(key, turn) >> 1


def uniform(run: int, part: str, count: int) -> float:
    """Number in [0, 1) for the `count`-th draw of a part of a run.

    >>> uniform(7, "slot 1", 1) == uniform(7, "slot 1", 1) != uniform(7, "slot 1", 2)
    True
    """
    name = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "big")
    return (_mix(_mix(run & _MASK, name), count) >> 11) * 2.0**-53


def _mix(state: int, part: int) -> int:
    state = (state ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
    state = (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 32)
