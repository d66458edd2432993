"""Parts of a report that stand for themselves."""

import msgspec

from rollart.types.affinity import AffinityCause


class Redundancy(msgspec.Struct):
    """Cost and benefit of the extra members of a task's groups."""

    extra: int = 0
    """Extra members of groups that were opened last."""
    started: int = 0
    trained: int = 0
    """Members trained beyond the promised size."""
    redundant_tokens: int = 0
    """Tokens of members that were stopped because their group was claimed without them."""
    saved_s: float = 0.0
    """Lower bound on the seconds that groups would have waited longer without extra members."""


class Decision(msgspec.Struct):
    """Tasks that were assigned to a hardware class by measurement."""

    at: float
    cause: AffinityCause
    why: list[str]
