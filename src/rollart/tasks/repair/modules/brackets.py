"""Brackets in text: whether they match, how deep they go, what they enclose."""

PAIRS = {")": "(", "]": "[", "}": "{"}


def balanced(text: str) -> bool:
    """Whether every bracket has its partner, properly nested."""
    opened: list[str] = []
    for sign in text:
        if sign in PAIRS.values():
            opened.append(sign)
        elif sign in PAIRS:
            if not opened or opened[-1] != PAIRS[sign]:
                return False
            opened.pop()
    return not opened


def depth(text: str) -> int:
    """Most brackets that are open at once; ValueError if one is closed that is not open."""
    deepest = 0
    current = 0
    for sign in text:
        if sign in PAIRS.values():
            current += 1
            deepest = max(deepest, current)
        elif sign in PAIRS:
            current -= 1
            if current < 0:
                raise ValueError("closed before it was opened")
    return deepest


def partner(text: str, place: int) -> int:
    """Where the bracket that opens at a place is closed; -1 if it is not."""
    level = 0
    for index in range(place, len(text)):
        if text[index] in PAIRS.values():
            level += 1
        elif text[index] in PAIRS:
            level -= 1
        if level == 0:
            return index
    return -1


def inside(text: str) -> str:
    """The text between the first bracket and its partner; empty if there is none."""
    for place, sign in enumerate(text):
        if sign in PAIRS.values():
            end = partner(text, place)
            if end < 0:
                return ""
            return text[place + 1 : end]
    return ""


def missing(text: str) -> int:
    """How many round brackets must be added to balance the round ones."""
    opened = 0
    added = 0
    for sign in text:
        if sign == "(":
            opened += 1
        elif sign == ")":
            if opened > 0:
                opened -= 1
            else:
                added += 1
    return added + opened
