"""Ciphers of school days. Letters are from a to z; other signs stay as they are."""


def shift(letter: str, by: int) -> str:
    """The letter so many places later, from z on to a."""
    if not letter.isalpha():
        return letter
    base = ord("A") if letter.isupper() else ord("a")
    return chr((ord(letter) - base + by) % 26 + base)


def caesar(text: str, by: int) -> str:
    """Every letter shifted by the same number of places."""
    return "".join(shift(letter, by) for letter in text)


def vigenere(text: str, key: str, decode: bool = False) -> str:
    """Letters shifted by those of the key in turn, a for none; other signs use up no letter of it."""
    result = ""
    used = 0
    for letter in text:
        if letter.isalpha():
            by = ord(key[used % len(key)]) - ord("a")
            result += shift(letter, -by if decode else by)
            used += 1
        else:
            result += letter
    return result


def atbash(text: str) -> str:
    """The first letter becomes the last, the second the last but one."""
    result = ""
    for letter in text:
        if "a" <= letter <= "z":
            result += chr(ord("a") + ord("z") - ord(letter))
        else:
            result += letter
    return result


def rail_fence(text: str, rails: int) -> str:
    """Written in zigzag over some rails, and read rail by rail."""
    if rails < 2:
        return text
    rows = [""] * rails
    row = 0
    down = True
    for letter in text:
        rows[row] += letter
        if row == 0:
            down = True
        elif row == rails - 1:
            down = False
        row += 1 if down else -1
    return "".join(rows)
