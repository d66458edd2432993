"""Roman numerals from 1 to 3999."""

SIGNS = [
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
]  # fmt: skip


def to_roman(number: int) -> str:
    """A number as a numeral."""
    if number < 1 or number > 3999:
        raise ValueError(f"{number} has no numeral")
    text = ""
    for value, sign in SIGNS:
        while number >= value:
            text += sign
            number -= value
    return text


def from_roman(text: str) -> int:
    """The number of a numeral; ValueError if it is not one."""
    number = 0
    place = 0
    for value, sign in SIGNS:
        while text.startswith(sign, place):
            number += value
            place += len(sign)
    if place != len(text) or number == 0:
        raise ValueError(f"{text} is not a numeral")
    if to_roman(number) != text:
        raise ValueError(f"{text} is not written as usual")
    return number


def add(one: str, other: str) -> str:
    """The sum of two numerals."""
    return to_roman(from_roman(one) + from_roman(other))


def is_longer(one: int, other: int) -> bool:
    """Whether the numeral of a number has more signs than that of another."""
    return len(to_roman(one)) > len(to_roman(other))


def longest(numbers: list[int]) -> int:
    """The number with the longest numeral, the first of several."""
    best = numbers[0]
    for number in numbers[1:]:
        if is_longer(number, best):
            best = number
    return best
