"""Version numbers such as 1.4.2."""

Version = tuple[int, ...]


def parse(text: str) -> Version:
    """The parts of a version as numbers; ValueError if one is not a number."""
    parts = text.removeprefix("v").split(".")
    numbers: list[int] = []
    for part in parts:
        if not part.isdigit():
            raise ValueError(f"{text} is not a version")
        numbers.append(int(part))
    return tuple(numbers)


def compare(one: str, other: str) -> int:
    """-1, 0 or 1 if the first is older, the same or newer; missing parts are 0."""
    left, right = parse(one), parse(other)
    for place in range(max(len(left), len(right))):
        a = left[place] if place < len(left) else 0
        b = right[place] if place < len(right) else 0
        if a != b:
            return -1 if a < b else 1
    return 0


def newest(versions: list[str]) -> str:
    """The newest version, the first of equal ones."""
    best = versions[0]
    for version in versions[1:]:
        if compare(version, best) > 0:
            best = version
    return best


def bump(text: str, place: int) -> str:
    """The version with one part raised by one, and all later parts 0."""
    numbers = list(parse(text))
    numbers[place] += 1
    for later in range(place + 1, len(numbers)):
        numbers[later] = 0
    return ".".join(str(number) for number in numbers)


def compatible(installed: str, wanted: str) -> bool:
    """Whether the first part is the same and the installed version is not older."""
    if parse(installed)[0] != parse(wanted)[0]:
        return False
    return compare(installed, wanted) >= 0


def in_range(text: str, low: str, high: str) -> bool:
    """Whether a version is at least the low one and older than the high one."""
    return compare(text, low) >= 0 and compare(text, high) < 0
