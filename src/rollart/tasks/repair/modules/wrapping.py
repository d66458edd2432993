"""Text in lines of a given width."""


def wrap(text: str, width: int) -> list[str]:
    """Words in lines of at most a width; a longer word has a line of its own."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if not line:
            line = word
        elif len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def center(text: str, width: int) -> str:
    """Spaces on both sides, one more on the right if it does not come out even."""
    missing = width - len(text)
    if missing <= 0:
        return text
    left = missing // 2
    return " " * left + text + " " * (missing - left)


def shorten(text: str, width: int) -> str:
    """The text, or its beginning and three dots if it is longer than the width."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def indent(lines: list[str], spaces: int) -> list[str]:
    """Spaces before every line that is not empty."""
    moved: list[str] = []
    for line in lines:
        if line:
            moved.append(" " * spaces + line)
        else:
            moved.append(line)
    return moved


def columns(rows: list[list[str]]) -> list[str]:
    """Rows as lines, each column as wide as its widest cell."""
    if not rows:
        return []
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(" ".join(cells).rstrip())
    return lines
