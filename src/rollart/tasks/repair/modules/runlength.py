"""Run-length coding: aaab is a3b1."""


def runs(text: str) -> list[tuple[str, int]]:
    """The runs of equal signs, in order."""
    found: list[tuple[str, int]] = []
    for sign in text:
        if found and found[-1][0] == sign:
            found[-1] = (sign, found[-1][1] + 1)
        else:
            found.append((sign, 1))
    return found


def encode(text: str) -> str:
    """Each run as its sign and its length."""
    return "".join(sign + str(count) for sign, count in runs(text))


def decode(code: str) -> str:
    """The inverse of encode; ValueError if a length is missing."""
    text = ""
    place = 0
    while place < len(code):
        sign = code[place]
        end = place + 1
        while end < len(code) and code[end].isdigit():
            end += 1
        if end == place + 1:
            raise ValueError(f"{sign} has no length")
        text += sign * int(code[place + 1 : end])
        place = end
    return text


def longest_run(text: str) -> int:
    """The length of the longest run; 0 for an empty text."""
    longest = 0
    for _, count in runs(text):
        if count > longest:
            longest = count
    return longest


def squeeze(text: str, most: int) -> str:
    """The text with runs of at most so many signs."""
    short = ""
    for sign, count in runs(text):
        short += sign * min(count, most)
    return short


def pays(text: str) -> bool:
    """Whether the code is shorter than the text."""
    return len(encode(text)) < len(text)
