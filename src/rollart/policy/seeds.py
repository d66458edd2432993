"""Seeds that depend on what is sampled, not on when: a turn of a member of a prompt has the same seed in every mode."""

_MASK = (1 << 64) - 1


def sampling_seed(run: int, prompt: int, member: int, turn: int) -> int:
    """A 63-bit seed for one turn of one member of one prompt."""
    state = run & _MASK
    for part in (prompt, member, turn):
        state = (state ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 32
    return state >> 1
