"""Polynomials as lists of coefficients, the constant first. Zero is the empty list."""

Poly = list[int]


def trim(poly: Poly) -> Poly:
    """The same polynomial without zeros at its end."""
    end = len(poly)
    while end > 0 and poly[end - 1] == 0:
        end -= 1
    return poly[:end]


def degree(poly: Poly) -> int:
    """The highest power with a coefficient; -1 for zero."""
    return len(trim(poly)) - 1


def value(poly: Poly, x: int) -> int:
    """The value at a point."""
    total = 0
    for coefficient in reversed(poly):
        total = total * x + coefficient
    return total


def add(one: Poly, other: Poly) -> Poly:
    """The sum."""
    total: Poly = []
    for place in range(max(len(one), len(other))):
        left = one[place] if place < len(one) else 0
        right = other[place] if place < len(other) else 0
        total.append(left + right)
    return trim(total)


def multiply(one: Poly, other: Poly) -> Poly:
    """The product."""
    product = [0] * (len(one) + len(other))
    for i, left in enumerate(one):
        for j, right in enumerate(other):
            product[i + j] += left * right
    return trim(product)


def derivative(poly: Poly) -> Poly:
    """The derivative."""
    return [power * poly[power] for power in range(1, len(poly))]


def roots(poly: Poly, low: int, high: int) -> list[int]:
    """Whole numbers from low to high, both included, where the value is zero."""
    found: list[int] = []
    for x in range(low, high + 1):
        if value(poly, x) == 0:
            found.append(x)
    return found
