"""A calculator that reads the operator after its operands: 3 4 + 2 * is 14."""


def apply(sign: str, left: int, right: int) -> int:
    """One operation on whole numbers; ValueError for an unknown sign or a division by zero."""
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if sign == "/":
        if right == 0:
            raise ValueError("division by zero")
        return left // right
    raise ValueError(f"unknown sign {sign}")


def is_number(word: str) -> bool:
    """Whether a word is a whole number."""
    if word.startswith("-"):
        word = word[1:]
    return word.isdigit()


def evaluate(text: str) -> int:
    """The value of a calculation; ValueError if operands are missing or left."""
    stack: list[int] = []
    for word in text.split():
        if is_number(word):
            stack.append(int(word))
        else:
            if len(stack) < 2:
                raise ValueError("an operand is missing")
            right = stack.pop()
            left = stack.pop()
            stack.append(apply(word, left, right))
    if len(stack) != 1:
        raise ValueError("operands are left")
    return stack[0]


def from_infix(text: str) -> str:
    """A calculation with spaces between its parts, products before sums, in this notation."""
    rank = {"+": 1, "-": 1, "*": 2, "/": 2}
    output: list[str] = []
    waiting: list[str] = []
    for word in text.split():
        if word in rank:
            while waiting and rank[waiting[-1]] >= rank[word]:
                output.append(waiting.pop())
            waiting.append(word)
        else:
            output.append(word)
    while waiting:
        output.append(waiting.pop())
    return " ".join(output)
