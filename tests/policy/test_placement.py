"""Placement: which node to ask for, and what a worker waits for."""

from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.placement import FAILURES_IN_PLACE, SETTLED_S, Moves, Place, Wait, decide, emptied, impossible, plan
from rollart.types.placement import ACCELERATOR, ANYWHERE, NODE_ID, Needs, Node

KINDS = ("H800", "H20", "")


def node(id: str, kind: str = "", *, gpus: float = 0, cpus: float = 4, used: float = 0, draining: bool = False) -> Node:
    total = {"CPU": float(cpus), "GPU": float(gpus), "memory": 2.0**34}
    free = {name: max(0.0, amount - used) for name, amount in total.items()}
    return Node(id, "10.0.0.1", {ACCELERATOR: kind, NODE_ID: id} if kind else {NODE_ID: id}, total, free, draining)


def engine(kind: str = "H800", gpus: int = 1) -> Needs:
    return Needs(gpus=gpus, cpus=1, labels={ACCELERATOR: kind}, pool=kind)


ENVIRONMENT = Needs(cpus=1, labels={ACCELERATOR: "H20"}, fallback=(ANYWHERE,), pool="H20")


def test_the_preferred_kind_comes_first() -> None:
    nodes = [node("a", "H20", gpus=2), node("b", "H800", gpus=2)]
    assert decide(engine(), nodes) == Place({ACCELERATOR: "H800"})
    assert decide(ENVIRONMENT, nodes) == Place({ACCELERATOR: "H20"}, node="a")


def test_an_engine_waits_for_its_kind() -> None:
    full = node("a", "H800", gpus=1, used=1)
    assert decide(engine(), [full, node("b", "H20", gpus=8)]) == Wait(
        "H800 full: needs 1 GPU, 1 CPU on a node with ray.io/accelerator-type=H800"
    )
    gone = decide(engine(), [node("b", "H20", gpus=8)])
    assert isinstance(gone, Wait)
    assert gone.why.startswith("H800 missing")


def test_what_may_run_elsewhere_does_and_says_why() -> None:
    assert decide(ENVIRONMENT, [node("a", "H20", used=4), node("b")]) == Place({}, node="b", why="H20 full")
    assert decide(ENVIRONMENT, [node("b")]) == Place({}, node="b", why="H20 missing")
    assert isinstance(decide(ENVIRONMENT, [node("b", used=4)]), Wait)


def test_nothing_is_placed_on_a_node_that_drains() -> None:
    assert isinstance(decide(engine(), [node("a", "H800", gpus=2, draining=True)]), Wait)


def test_a_restart_is_in_place_and_after_the_second_failure_elsewhere() -> None:
    nodes = [node("a", "H800", gpus=1), node("b", "H800", gpus=1)]
    assert decide(engine(), nodes, last="b", failures=1) == Place({ACCELERATOR: "H800"}, node="b")
    again = decide(engine(), nodes, last="b", failures=FAILURES_IN_PLACE)
    assert again == Place({ACCELERATOR: "H800", NODE_ID: "!b"})
    only = decide(engine(), nodes[:1], last="a", failures=FAILURES_IN_PLACE)
    assert only == Place({ACCELERATOR: "H800"}, node="a"), "there is no other"


def test_what_can_never_be_placed_is_named_with_what_there_is() -> None:
    nodes = [node("a", "H20", gpus=1), node("b", "H20", gpus=1), node("c")]
    asked = [("engine/big/0", engine("H20", 2)), ("engine/big/1", engine("H20", 2)), ("reward/0", Needs(cpus=1))]
    assert impossible(asked, nodes) == [
        "engine/big/0 and 1 more (pool H20) needs 2 GPUs, 1 CPU on a node with ray.io/accelerator-type=H20; "
        "the cluster has 2 × H20 with 4 CPUs and 1 GPUs, 1 × cpu with 4 CPUs"
    ]
    occupied = [node("a", "H20", gpus=2, used=2)]
    assert impossible(asked, occupied) == [], "what is only occupied is waited for"


nodes_drawn = st.lists(
    st.builds(
        node,
        st.sampled_from("abcdef"),
        st.sampled_from(KINDS),
        gpus=st.integers(0, 4),
        cpus=st.integers(0, 4),
        used=st.integers(0, 4),
        draining=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda drawn: drawn.id,
)
needs_drawn = st.builds(
    Needs,
    gpus=st.integers(0, 3),
    cpus=st.integers(0, 3),
    labels=st.sampled_from([{}, {ACCELERATOR: "H800"}, {ACCELERATOR: "H20"}]),
    fallback=st.sampled_from([(), (ANYWHERE,), ({ACCELERATOR: "H20"},)]),
)


@given(needs_drawn, nodes_drawn, st.sampled_from(["", *"abcdef"]), st.integers(0, 3))
def test_there_is_a_node_with_room_behind_every_place(
    needs: Needs, nodes: list[Node], last: str, failures: int
) -> None:
    def admitted(candidate: Node, labels: dict[str, str]) -> bool:
        return all(
            candidate.labels.get(name) != value[1:] if value.startswith("!") else candidate.labels.get(name) == value
            for name, value in labels.items()
        )

    def room(candidate: Node) -> bool:
        return not candidate.draining and all(
            candidate.free.get(name, 0) >= amount for name, amount in needs.resources.items()
        )

    found = decide(needs, nodes, last=last, failures=failures)
    if isinstance(found, Place):
        admitting = [candidate for candidate in nodes if admitted(candidate, found.labels) and room(candidate)]
        assert admitting
        assert not found.node or found.node in [candidate.id for candidate in admitting]
        assert not found.why or needs.fallback
    else:
        kind = [candidate for candidate in nodes if admitted(candidate, needs.labels) and room(candidate)]
        assert not kind


def test_fallbacks_are_tried_in_their_order() -> None:
    needs = Needs(gpus=1, labels={ACCELERATOR: "H800"}, fallback=({ACCELERATOR: "H20"},), pool="H800")
    assert decide(needs, [node("a", "L40", gpus=8), node("b", "H20", gpus=8)]) == Place(
        {ACCELERATOR: "H20"}, why="H800 missing"
    )
    assert isinstance(decide(needs, [node("a", "L40", gpus=8)]), Wait)


def test_a_plan_uses_up_what_is_free() -> None:
    nodes = [node("a", "H800", gpus=2), node("b", "H800", gpus=1), node("c")]
    planned = plan([(f"engine/{n}", engine()) for n in range(4)], nodes)
    assert [each.node and each.node.id for each in planned] == ["a", "b", "a", None]
    assert planned[3].why.startswith("H800 full")


def test_an_emptied_cluster_has_room_for_what_only_waits() -> None:
    full = [node("a", "H800", gpus=1, used=1)]
    assert plan([("engine/0", engine())], full)[0].node is None
    assert plan([("engine/0", engine())], emptied(full))[0].node is not None


def test_a_worker_on_a_draining_node_leaves_at_once_and_is_named_once() -> None:
    moves = Moves()
    moves.placed("engine/0", engine(), "a", "")
    nodes = [node("a", "H800", gpus=1, draining=True)]
    assert moves.look(0.0, nodes) == [("engine/0", "its node drains")]
    assert moves.look(1.0, nodes) == []


def test_a_worker_moves_back_only_after_its_kind_had_room_for_a_while() -> None:
    moves = Moves()
    moves.placed("environment/0", ENVIRONMENT, "b", "H20 missing")
    moves.placed("environment/1", ENVIRONMENT, "a", "")
    back, without = [node("a", "H20"), node("b")], [node("b")]
    assert moves.look(0.0, back) == []
    assert moves.look(SETTLED_S - 1, without) == [], "it was gone for a moment"
    assert moves.look(SETTLED_S, back) == []
    assert moves.look(2 * SETTLED_S - 0.5, back) == []
    assert moves.look(2 * SETTLED_S, back) == [("environment/0", "H20 has room again")]


def test_a_worker_that_is_gone_does_not_move() -> None:
    moves = Moves()
    moves.placed("environment/0", ENVIRONMENT, "b", "H20 missing")
    moves.gone("environment/0")
    assert moves.look(0.0, [node("a", "H20")]) == []
    assert moves.look(SETTLED_S, [node("a", "H20")]) == []


def test_a_worker_without_gpus_leaves_nodes_with_gpus_to_others() -> None:
    anywhere = Needs(cpus=1)
    assert decide(anywhere, [node("a", "H20", gpus=8, cpus=64), node("b")]) == Place({}, node="b")
    assert decide(anywhere, [node("a", "H20", gpus=8, cpus=64), node("b", used=4)]) == Place({}, node="a")
