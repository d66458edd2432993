"""Half-open intervals of whole numbers: (first, past the last)."""

Interval = tuple[int, int]


def clamp(value: int, low: int, high: int) -> int:
    """The number from low to high, both included, that is closest to a value."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def length(interval: Interval) -> int:
    """How many numbers an interval contains."""
    first, past = interval
    return max(0, past - first)


def overlap(one: Interval, other: Interval) -> Interval | None:
    """The interval that two have in common; None if they have no number in common."""
    first = max(one[0], other[0])
    past = min(one[1], other[1])
    if first >= past:
        return None
    return first, past


def merge(intervals: list[Interval]) -> list[Interval]:
    """The same numbers in as few intervals as possible, in order."""
    merged: list[Interval] = []
    for first, past in sorted(intervals):
        if first >= past:
            continue
        if merged and first <= merged[-1][1]:
            start, end = merged[-1]
            merged[-1] = (start, max(end, past))
        else:
            merged.append((first, past))
    return merged


def covered(intervals: list[Interval]) -> int:
    """How many different numbers intervals contain together."""
    total = 0
    for interval in merge(intervals):
        total += length(interval)
    return total


def gaps(intervals: list[Interval], within: Interval) -> list[Interval]:
    """What intervals leave free within another one."""
    free: list[Interval] = []
    begin, end = within
    for first, past in merge(intervals):
        if first > begin:
            free.append((begin, min(first, end)))
        begin = max(begin, past)
        if begin >= end:
            break
    if begin < end:
        free.append((begin, end))
    return free
