"""Cells of a rectangular board: rows of # and . signs."""

Cell = tuple[int, int]


def size(board: list[str]) -> tuple[int, int]:
    """Rows and columns."""
    if not board:
        return 0, 0
    return len(board), len(board[0])


def neighbours(board: list[str], cell: Cell) -> list[Cell]:
    """The cells above, below, left and right of a cell, as far as they are on the board."""
    rows, columns = size(board)
    row, column = cell
    found: list[Cell] = []
    for other_row, other_column in [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]:
        if 0 <= other_row < rows and 0 <= other_column < columns:
            found.append((other_row, other_column))
    return found


def filled(board: list[str]) -> int:
    """How many cells are #."""
    return sum(row.count("#") for row in board)


def around(board: list[str], cell: Cell) -> int:
    """How many of the eight cells around a cell are #."""
    rows, columns = size(board)
    count = 0
    for row in range(max(0, cell[0] - 1), min(rows, cell[0] + 2)):
        for column in range(max(0, cell[1] - 1), min(columns, cell[1] + 2)):
            if (row, column) != cell and board[row][column] == "#":
                count += 1
    return count


def islands(board: list[str]) -> int:
    """How many groups of # cells there are, joined by their sides."""
    rows, columns = size(board)
    seen: list[Cell] = []
    count = 0
    for row in range(rows):
        for column in range(columns):
            if board[row][column] == "#" and (row, column) not in seen:
                count += 1
                group = [(row, column)]
                for cell in group:
                    for other in neighbours(board, cell):
                        if board[other[0]][other[1]] == "#" and other not in group:
                            group.append(other)
                seen.extend(group)
    return count


def rotate(board: list[str]) -> list[str]:
    """The board turned by a quarter to the right."""
    rows, columns = size(board)
    return ["".join(board[row][column] for row in reversed(range(rows))) for column in range(columns)]
