"""Seeds that depend on what is sampled, not on when: a turn of a member of a prompt has the same seed in every mode."""

_MASK = (1 << 64) - 1


def member_key(run: int, prompt: int, member: int) -> int:
    """What the seeds of all turns of one member of one prompt are made from."""
    return _mix(_mix(run & _MASK, prompt), member)


def turn_seed(key: int, turn: int) -> int:
    """A 63-bit seed for one turn."""
    return _mix(key, turn) >> 1


def _mix(state: int, part: int) -> int:
    state = (state ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
    state = (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 32)
