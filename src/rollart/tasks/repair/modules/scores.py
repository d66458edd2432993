"""Scores of a game: averages, ranks, streaks."""


def mean(scores: list[int]) -> float:
    """The average; 0 without scores."""
    if not scores:
        return 0.0
    return sum(scores) / len(scores)


def median(scores: list[int]) -> float:
    """The middle score, or the average of the two middle ones."""
    ordered = sorted(scores)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def ranks(scores: list[int]) -> list[int]:
    """The rank of each score, 1 for the highest; equal scores share the better rank."""
    found: list[int] = []
    for score in scores:
        better = 0
        for other in scores:
            if other > score:
                better += 1
        found.append(better + 1)
    return found


def streak(results: list[bool]) -> int:
    """The most wins in a row."""
    best = 0
    current = 0
    for won in results:
        if won:
            current += 1
            best = max(best, current)
        else:
            current = 0
    return best


def grade(score: int, limits: list[int]) -> str:
    """A for a score of at least the first limit, B for the second, and so on."""
    for place, limit in enumerate(limits):
        if score >= limit:
            return "ABCDEF"[place]
    return "F"


def without_worst(scores: list[int], count: int) -> list[int]:
    """The scores in their order, without the lowest of them; the first of equal ones goes."""
    kept = list(scores)
    for _ in range(count):
        if kept:
            kept.remove(min(kept))
    return kept
