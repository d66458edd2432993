"""What the author of a worker declares, without a cluster."""

import pytest

from rollart.distributed.worker import Mode, Worker, hw_mapping, register, register_serverless, route
from rollart.types.errors import RequestError

AFFINITY = {"FrozenLake": "H800", "GEM-math": "H20", "default": "H20"}


class Generator(Worker):
    @hw_mapping(hw_affinity=AFFINITY)
    def generate(self, prompts, temperature=1.0, tag_name="default"): ...

    @register(mode="execute_all", beside=True)
    @hw_mapping(hw_affinity=AFFINITY)
    def first(self, tag_name="default"): ...

    @hw_mapping(hw_affinity=AFFINITY)
    @register(mode="execute_rank_zero")
    def second(self, *, tag_name="default"): ...

    @register()
    def update(self): ...


class Derived(Generator):
    @register(mode="execute_rank_zero")
    def generate(self, prompts): ...


def test_a_mapping_registers_by_itself_and_in_any_order():
    found = Generator.registered
    assert {name: each.mode for name, each in found.items()} == {
        "generate": Mode.SHARD,
        "first": Mode.EXECUTE_ALL,
        "second": Mode.EXECUTE_RANK_ZERO,
        "update": Mode.EXECUTE_ALL,
    }
    assert found["first"].beside
    assert {name for name, each in found.items() if each.affinity is None} == {"update"}
    assert Derived.registered["generate"].affinity is None
    assert Derived.registered["first"] == found["first"]


def test_the_tag_of_a_call_is_its_argument_however_it_is_given():
    affinity = Generator.registered["generate"].affinity
    assert affinity.tag_of((["a"],), {}) == "default"
    assert affinity.tag_of((["a"],), {"tag_name": "FrozenLake"}) == "FrozenLake"
    assert affinity.tag_of((["a"], 0.5, "GEM-math"), {}) == "GEM-math"
    with pytest.raises(TypeError, match="unexpected keyword"):
        affinity.tag_of((["a"],), {"tag": "FrozenLake"})


@pytest.mark.parametrize(
    ("tag", "resources", "ranks", "why"),
    [
        ("FrozenLake", {0: "H800", 1: "H20", 2: "H800"}, (0, 2), ""),
        ("unknown", {0: "H800", 1: "H20"}, (1,), ""),
        ("FrozenLake", {1: "H20"}, (1,), "no rank on H800"),
        ("FrozenLake", {0: "", 1: ""}, (0, 1), "no rank on H800 and none on H20"),
        ("default", {0: "H800"}, (0,), "no rank on H20"),
        ("default", {}, (), "no rank on H20"),
    ],
)
def test_a_call_goes_to_the_class_of_its_tag_or_falls_back(tag, resources, ranks, why):
    found = route(AFFINITY, tag, resources)
    assert (found.ranks, found.why) == (ranks, why)
    assert found.wanted == AFFINITY.get(tag, "H20")


def test_what_cannot_be_routed_is_refused_where_it_is_declared():
    with pytest.raises(RequestError, match="no class for 'default'"):
        hw_mapping(hw_affinity={"FrozenLake": "H800"})
    with pytest.raises(RequestError, match=r"no parameter tag_name; add tag_name='default'"):
        hw_mapping(hw_affinity=AFFINITY)(lambda self, prompts: None)  # noqa: ARG005


URL = "https://fn.example/judge"


class Judges(Worker):
    @register_serverless(attribute="judge", serverless_url=URL, secret="JUDGE_SECRET")
    def compute_rewards(self, transcripts): ...

    @register(mode="execute_all")
    @register_serverless(attribute="other", serverless_url=f"{URL}/2")
    def compute_others(self, transcripts): ...


class Moved(Judges):
    @register_serverless(attribute="judge", serverless_url="http://elsewhere/")
    def compute_rewards(self, transcripts): ...


def test_a_function_behind_a_url_takes_the_place_of_an_attribute():
    assert {name: each.mode for name, each in Judges.registered.items()} == {
        "compute_rewards": Mode.SHARD,
        "compute_others": Mode.EXECUTE_ALL,
    }
    assert Judges.serverless["judge"].url == URL
    assert Judges.serverless["judge"].options == {"secret": "JUDGE_SECRET"}
    assert {name: each.url for name, each in Moved.serverless.items()} == {
        "judge": "http://elsewhere/",
        "other": f"{URL}/2",
    }


@pytest.mark.parametrize(
    ("changes", "why"), [({"serverless_url": "fn.example"}, "is not a URL"), ({"attribute": "a b"}, "the name of")]
)
def test_what_cannot_be_called_is_refused(changes, why):
    with pytest.raises(RequestError, match=why):
        register_serverless(**{"attribute": "judge", "serverless_url": URL, **changes})
