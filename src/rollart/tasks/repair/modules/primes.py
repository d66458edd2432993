"""Divisors and prime numbers."""


def gcd(one: int, other: int) -> int:
    """The greatest common divisor."""
    while other != 0:
        one, other = other, one % other
    return abs(one)


def lcm(one: int, other: int) -> int:
    """The least common multiple; 0 if one of them is 0."""
    if one == 0 or other == 0:
        return 0
    return abs(one * other) // gcd(one, other)


def is_prime(number: int) -> bool:
    """Whether a number has no divisor but 1 and itself."""
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def factors(number: int) -> list[int]:
    """The prime factors, smallest first, as often as they divide."""
    found: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def divisors(number: int) -> list[int]:
    """All divisors, 1 and the number included."""
    return [each for each in range(1, number + 1) if number % each == 0]


def is_perfect(number: int) -> bool:
    """Whether a number is the sum of its divisors without itself."""
    return number > 1 and sum(divisors(number)) - number == number


def next_prime(number: int) -> int:
    """The smallest prime above a number."""
    number += 1
    while not is_prime(number):
        number += 1
    return number
