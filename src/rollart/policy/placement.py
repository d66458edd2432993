"""On which nodes a worker may run, and why it must wait if there is none.

Ray places workers; this module decides what to ask Ray for. A worker has a preferred kind of node, by labels, and a
list of kinds to fall back to. If the preferred kind has no room, the first other one with room is taken and the reason
is recorded; without such a kind the worker waits.

    preferred kind     fallback      decision
    has room           any           there
    full or missing    has room      there, reason 'full' or 'missing'
    full or missing    no room       wait, for room or for a node
    has room again     is used       the worker moves back, once that has held for `SETTLED_S` (`Moves`)

Invariants:

- A worker is never placed on a node that lacks something it needs, or that is draining.
- `impossible` speaks of a worker exactly if no node could take it even when empty: such a run is refused at its start.
- A worker that needs no GPU prefers nodes without any, among those that fit.
- On a restart the node of the last incarnation is preferred once; after a second failure there it is avoided, as long
  as another node has room.

A worked example: an engine that needs a GPU of an H800, while the only one is occupied.

    >>> node = Node("a1", "10.0.0.1", {ACCELERATOR: "H800"}, {"GPU": 1.0, "CPU": 8.0}, {"CPU": 8.0})
    >>> engine = Needs(gpus=1, labels={ACCELERATOR: "H800"}, pool="H800")
    >>> decide(engine, [node])
    Wait(why='H800 full: needs 1 GPU on a node with ray.io/accelerator-type=H800')
    >>> decide(Needs(cpus=1, labels={ACCELERATOR: "H20"}, fallback=({},), pool="H20"), [node])
    Place(labels={}, node='a1', why='H20 missing')
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollart.types.placement import ACCELERATOR, NODE_ID, Labels, Needs, Node

FAILURES_IN_PLACE = 2
"""Failures in a row on one node after which a worker is placed on another."""

TINY = 1e-6
"""Error of sums of fractions of a resource."""

SETTLED_S = 10.0
"""How long the preferred kind of node must have room before a worker moves back to it."""


class Place(msgspec.Struct, frozen=True):
    """Ask for a node with these labels."""

    labels: Labels
    """Selector: a value may be `!x`, any other than x."""
    node: str = ""
    """The node to prefer among them; empty if any will do."""
    why: str = ""
    """Why it is not the preferred kind; empty if it is."""


class Wait(msgspec.Struct, frozen=True):
    """No node has room."""

    why: str


def decide(needs: Needs, nodes: Sequence[Node], *, last: str = "", failures: int = 0) -> Place | Wait:
    """Where to ask for a node. `last` is the node of the previous incarnation, `failures` those there in a row."""
    usable = [node for node in nodes if not node.draining]
    with_room = [node for node in usable if _covers(node.free, needs)]
    could = any(_has(node, needs.labels) and _covers(node.total, needs) for node in usable)
    why = f"{needs.pool or 'the cluster'} {'full' if could else 'missing'}"
    for labels in (needs.labels, *needs.fallback):
        alike = [node for node in with_room if _has(node, labels)]
        if alike:
            place = _among(alike, labels, last, failures)
            if not needs.gpus and not place.node and NODE_ID not in place.labels:
                place = msgspec.structs.replace(place, node=_roomiest(_without_gpus(alike)).id)
            return place if labels == needs.labels else msgspec.structs.replace(place, why=why)
    return Wait(f"{why}: needs {needs}")


class PlaceRanks(msgspec.Struct, frozen=True):
    """Ask for a node for each of several ranks."""

    labels: list[Labels]
    """Selector of each rank."""
    why: str = ""
    """Why some are not on the preferred kind; empty if all are."""


def decide_ranks(needs: Needs, ranks: int, nodes: Sequence[Node]) -> PlaceRanks | Wait:
    """Where to ask for nodes for ranks that need this much each: as many as fit on the preferred kind, the others
    elsewhere if they may.

    >>> one = Node("a1", "10.0.0.1", {ACCELERATOR: "H800"}, {"CPU": 3.0}, {"CPU": 2.0})
    >>> two = Node("b2", "10.0.0.2", {}, {"CPU": 4.0}, {"CPU": 4.0})
    >>> decide_ranks(Needs(cpus=1, labels={ACCELERATOR: "H800"}, fallback=({},), pool="H800"), 3, [one, two])
    PlaceRanks(labels=[{'ray.io/accelerator-type': 'H800'}, {'ray.io/accelerator-type': 'H800'}, {}], why='H800 full')
    >>> decide_ranks(Needs(cpus=1), 8, [one, two])
    Wait(why='the cluster full: 8 ranks need 1 CPU each')
    """
    left = {node.id: msgspec.structs.replace(node, free=dict(node.free)) for node in nodes}
    labels: list[Labels] = []
    why = ""
    for _ in range(ranks):
        found = decide(needs, list(left.values()))
        if isinstance(found, Wait):
            return Wait(f"{found.why.partition(':')[0]}: {ranks} ranks need {needs} each")
        node = next(node for node in left.values() if _fits(node, needs, found.labels))
        for name, amount in needs.resources.items():
            node.free[name] -= amount
        labels.append(found.labels)
        why = found.why or why
    return PlaceRanks(labels, why)


def _among(nodes: Sequence[Node], labels: Labels, last: str, failures: int) -> Place:
    """Prefer the node of the last incarnation; avoid it after `FAILURES_IN_PLACE` failures."""
    there = any(node.id == last for node in nodes)
    if failures >= FAILURES_IN_PLACE and there and len(nodes) > 1:
        return Place(labels | {NODE_ID: f"!{last}"})
    return Place(labels, node=last if there else "")


def _without_gpus(nodes: Sequence[Node]) -> Sequence[Node]:
    """Nodes without GPUs, if there are any, so that the CPUs of GPU nodes stay free for engines."""
    return [node for node in nodes if not node.total.get("GPU")] or nodes


class Planned(msgspec.Struct, frozen=True):
    """Where a worker would run. Without a node it would wait, and `why` says for what."""

    name: str
    needs: Needs
    node: Node | None
    why: str = ""


def plan(asked: Iterable[tuple[str, Needs]], nodes: Sequence[Node]) -> list[Planned]:
    """Where workers would run if they were placed now, one after the other, each on the node with the most room.

    Ray may choose other nodes among those that fit, so this is an example of a placement.
    """
    left = list(nodes)
    planned = []
    for name, needs in asked:
        found = decide(needs, left)
        if isinstance(found, Wait):
            planned.append(Planned(name, needs, None, found.why))
            continue
        node = next((node for node in left if node.id == found.node), None)
        if node is None:
            node = _roomiest([node for node in left if _fits(node, needs, found.labels)])
        chosen = left.index(node)
        planned.append(Planned(name, needs, left[chosen], found.why))
        free = {key: amount - needs.resources.get(key, 0.0) for key, amount in left[chosen].free.items()}
        left[chosen] = msgspec.structs.replace(left[chosen], free=free)
    return planned


def emptied(nodes: Iterable[Node]) -> list[Node]:
    """The same nodes with nothing on them."""
    return [msgspec.structs.replace(node, free=node.total) for node in nodes]


def _roomiest(nodes: Sequence[Node]) -> Node:
    return max(nodes, key=lambda node: (node.free.get("GPU", 0.0), node.free.get("CPU", 0.0)))


def _fits(node: Node, needs: Needs, labels: Labels) -> bool:
    return not node.draining and _has(node, labels) and _covers(node.free, needs)


def impossible(asked: Iterable[tuple[str, Needs]], nodes: Sequence[Node]) -> list[str]:
    """For every worker that no node could take even when empty: its name, what it asks for and what there is."""
    found: dict[str, list[str]] = {}
    for name, needs in asked:
        if not any(_could(needs, node) for node in nodes):
            where = f" (pool {needs.pool})" if needs.pool else ""
            found.setdefault(f"{where} needs {needs}", []).append(name)
    there = f"the cluster has {inventory(nodes)}"
    return [f"{_first_of(names)}{asked_for}; {there}" for asked_for, names in found.items()]


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def inventory(nodes: Sequence[Node]) -> str:
    """The nodes of a cluster in a clause: alike ones are counted.

    >>> inventory([Node("a", "::1", {ACCELERATOR: "H20"}, {"CPU": 8.0, "GPU": 1.0}, {}), Node("b", "", {}, {}, {})])
    '1 × H20 with 8 CPUs and 1 GPUs, 1 × cpu with 0 CPUs'
    """
    kinds: dict[str, int] = {}
    for node in nodes:
        kinds[_kind(node)] = kinds.get(_kind(node), 0) + 1
    return ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())) or "no node"


def _kind(node: Node) -> str:
    gpus = node.total.get("GPU", 0)
    name = node.labels.get(ACCELERATOR) or ("gpu" if gpus else "cpu")
    return f"{name} with {node.total.get('CPU', 0):g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def _could(needs: Needs, node: Node) -> bool:
    return any(_has(node, labels) for labels in (needs.labels, *needs.fallback)) and _covers(node.total, needs)


def _has(node: Node, labels: Mapping[str, str]) -> bool:
    return all(node.labels.get(name) == value for name, value in labels.items())


def _covers(resources: Mapping[str, float], needs: Needs) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in needs.resources.items())


def how_many(needs: Needs, nodes: Iterable[Node], most: int) -> int:
    """Number of further workers with these needs, at most `most`, that fit beside each other on nodes of the preferred
    kind.

    >>> how_many(Needs(gpus=2), [Node("a", "", {}, {"GPU": 8.0}, {"GPU": 5.0}), Node("b", "", {}, {}, {})], 16)
    2
    """
    fitting = 0
    for node in nodes:
        if not node.draining and _has(node, needs.labels):
            shares = [node.free.get(name, 0.0) / amount for name, amount in needs.resources.items()]
            fitting += int(min([*shares, float(most)]) + TINY)
    return min(most, fitting)


def would_do(needs: Needs, of: Needs, nodes: Iterable[Node]) -> bool:
    """Whether a node that suits workers with the needs `of` could, when empty, also take one with `needs`."""
    return any(not node.draining and _has(node, of.labels) and _could(needs, node) for node in nodes)


class Moves:
    """Which workers should leave their node: because it drains, or because their preferred kind has room again.

    A worker is named once. The preferred kind must have room at every look for `SETTLED_S`: a node that comes and goes
    moves nothing.

    >>> moves, needs = Moves(), Needs(cpus=1, labels={ACCELERATOR: "H20"}, fallback=({},), pool="H20")
    >>> moves.placed("environment/0", needs, "a", "H20 missing")
    >>> back = Node("b", "10.0.0.2", {ACCELERATOR: "H20"}, {"CPU": 4.0}, {"CPU": 4.0})
    >>> moves.look(0.0, [back]), moves.look(SETTLED_S, [back]), moves.look(60.0, [back])
    ([], [('environment/0', 'H20 has room again')], [])
    """

    def __init__(self) -> None:
        self._placed: dict[str, tuple[Needs, str, str]] = {}
        self._room_since: dict[str, float] = {}

    def placed(self, worker: str, needs: Needs, node: str, why: str) -> None:
        """A worker runs on a node; `why` is empty if it is of the preferred kind."""
        self._placed[worker] = (needs, node, why)

    def gone(self, worker: str) -> None:
        self._placed.pop(worker, None)
        self._room_since.pop(worker, None)

    def look(self, now: float, nodes: Sequence[Node]) -> list[tuple[str, str]]:
        """Workers that should leave, with the reason."""
        by_id = {node.id: node for node in nodes}
        left = [node for node in nodes if not node.draining]
        leaving = []
        for worker, (needs, node, why) in list(self._placed.items()):
            here = by_id.get(node)
            if here is not None and here.draining:
                leaving.append((worker, "its node drains"))
            elif why and self._settled(worker, now, any(_fits(other, needs, needs.labels) for other in left)):
                leaving.append((worker, f"{needs.pool or 'its kind of node'} has room again"))
        for worker, _ in leaving:
            self.gone(worker)
        return leaving

    def _settled(self, worker: str, now: float, room: bool) -> bool:
        if not room:
            self._room_since.pop(worker, None)
            return False
        return now - self._room_since.setdefault(worker, now) >= SETTLED_S
