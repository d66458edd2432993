"""Amounts of money in whole cents."""


def to_cents(text: str) -> int:
    """An amount such as 12.50 or -3 in cents; ValueError if it has more than two decimals."""
    sign = 1
    if text.startswith("-"):
        sign = -1
        text = text[1:]
    whole, _, decimals = text.partition(".")
    if len(decimals) > 2:
        raise ValueError(f"{text} is not in cents")
    cents = int(decimals) if decimals else 0
    if len(decimals) == 1:
        cents *= 10
    return sign * (int(whole) * 100 + cents)


def to_text(cents: int) -> str:
    """The inverse of to_cents, with two decimals."""
    sign = "-" if cents < 0 else ""
    whole, rest = divmod(abs(cents), 100)
    return f"{sign}{whole}.{rest:02d}"


def split(cents: int, people: int) -> list[int]:
    """Equal shares, the first of them a cent larger if it does not come out even."""
    share, rest = divmod(cents, people)
    shares: list[int] = []
    for number in range(people):
        shares.append(share + 1 if number < rest else share)
    return shares


def with_tax(cents: int, percent: int) -> int:
    """The amount plus tax, rounded to the nearest cent, halves up."""
    tax = (cents * percent + 50) // 100
    return cents + tax


def change(cents: int, coins: list[int]) -> list[int]:
    """Coins of an amount, the largest first; ValueError if they do not come out even."""
    paid: list[int] = []
    for coin in sorted(coins, reverse=True):
        while cents >= coin:
            paid.append(coin)
            cents -= coin
    if cents > 0:
        raise ValueError(f"{cents} is left")
    return paid


def discount(cents: int, percent: int, most: int) -> int:
    """The amount after a discount that is limited to so many cents."""
    off = cents * percent // 100
    if off > most:
        off = most
    return cents - off
