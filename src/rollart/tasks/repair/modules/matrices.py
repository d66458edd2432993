"""Matrices as lists of rows."""

Matrix = list[list[int]]


def identity(size: int) -> Matrix:
    """Ones on the diagonal, zeros elsewhere."""
    return [[1 if row == column else 0 for column in range(size)] for row in range(size)]


def transpose(matrix: Matrix) -> Matrix:
    """Rows as columns."""
    if not matrix:
        return []
    return [[row[column] for row in matrix] for column in range(len(matrix[0]))]


def multiply(one: Matrix, other: Matrix) -> Matrix:
    """The product; ValueError if the sizes do not fit."""
    if len(one[0]) != len(other):
        raise ValueError("the sizes do not fit")
    product: Matrix = []
    for row in one:
        line: list[int] = []
        for column in transpose(other):
            line.append(sum(left * right for left, right in zip(row, column, strict=True)))
        product.append(line)
    return product


def power(matrix: Matrix, exponent: int) -> Matrix:
    """The matrix multiplied by itself so many times."""
    result = identity(len(matrix))
    while exponent > 0:
        if exponent % 2 == 1:
            result = multiply(result, matrix)
        matrix = multiply(matrix, matrix)
        exponent //= 2
    return result


def trace(matrix: Matrix) -> int:
    """The sum of the diagonal."""
    return sum(matrix[place][place] for place in range(len(matrix)))


def determinant(matrix: Matrix) -> int:
    """The determinant, by its first row."""
    if len(matrix) == 1:
        return matrix[0][0]
    total = 0
    for column, number in enumerate(matrix[0]):
        minor = [row[:column] + row[column + 1 :] for row in matrix[1:]]
        sign = -1 if column % 2 == 1 else 1
        total += sign * number * determinant(minor)
    return total


def is_symmetric(matrix: Matrix) -> bool:
    """Whether rows and columns are the same."""
    return matrix == transpose(matrix)
