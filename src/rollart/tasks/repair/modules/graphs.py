"""Directed graphs as lists of neighbours by node."""

Graph = dict[str, list[str]]


def distance(graph: Graph, start: str, end: str) -> int:
    """Fewest edges from one node to another; -1 if there is no way."""
    steps = {start: 0}
    waiting = [start]
    while waiting:
        node = waiting.pop(0)
        if node == end:
            return steps[node]
        for other in graph.get(node, []):
            if other not in steps:
                steps[other] = steps[node] + 1
                waiting.append(other)
    return -1


def reachable(graph: Graph, start: str) -> list[str]:
    """Nodes that can be reached from one, itself included, in alphabetical order."""
    found = [start]
    for node in found:
        for other in graph.get(node, []):
            if other not in found:
                found.append(other)
    return sorted(found)


def in_degree(graph: Graph, node: str) -> int:
    """How many edges end at a node."""
    count = 0
    for others in graph.values():
        count += others.count(node)
    return count


def reverse(graph: Graph) -> Graph:
    """The same graph with every edge turned round."""
    turned: Graph = {node: [] for node in graph}
    for node, others in graph.items():
        for other in others:
            turned.setdefault(other, []).append(node)
    return turned


def order(graph: Graph) -> list[str]:
    """Nodes so that every edge leads forwards, alphabetically where free; ValueError for a cycle."""
    nodes = sorted(reverse(graph))
    left = {node: in_degree(graph, node) for node in nodes}
    done: list[str] = []
    while len(done) < len(nodes):
        free = [node for node in nodes if left[node] == 0 and node not in done]
        if not free:
            raise ValueError("the graph has a cycle")
        done.append(free[0])
        for other in graph.get(free[0], []):
            left[other] -= 1
    return done
