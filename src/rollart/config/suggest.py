"""Spelling suggestions for user input."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suffix that suggests the closest known word, or an empty string.

    >>> did_you_mean("group_sise", ["group_size", "trajectories"])
    ' (did you mean group_size?)'
    """
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.5)
    return f" (did you mean {folded[close[0]]}?)" if close else ""
