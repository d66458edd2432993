"""Rewards in Ray actors keep the promises of their port, and give the same rewards as anywhere else."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.backends.rewards.host import RewardHost
from rollart.backends.rewards.replica_host import ReplicaHost
from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.reward import CASES, RewardHarness
from rollart.distributed.ray_replicas import RayReplicas

TESTS = Path(__file__).parents[1]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> RewardHarness:
    monkeypatch.syspath_prepend(TESTS / "ports")
    from harnesses import rewards

    def in_actors(function):
        settings = {"function": f"{rewards.__name__}:{function.__name__}", "slots": 2, "starter": RayReplicas()}
        return lambda wake: ReplicaHost(settings, wake)

    return replace(
        rewards.hosted_reward(),
        build=in_actors(rewards.judge),
        of_group=in_actors(rewards.rank),
        in_parts=in_actors(rewards.in_parts),
        calls=None,
        hanging=lambda index: msgspec.structs.replace(rewards.hanging(index), deadline_s=20.0),
    )


@pytest.mark.long
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[RewardHarness, None], harness: RewardHarness) -> None:
    try:
        case.run(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_a_reward_is_the_same_in_actors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS / "backends")
    from parts import RewardDriver
    from replayed import MATH, TEXT, episodes, scores

    records = episodes(number)
    for function in (MATH, TEXT):
        here = RewardDriver(RewardHost, {"function": function})
        there = RewardDriver(ReplicaHost, {"function": function, "slots": 2, "starter": RayReplicas()})
        assert scores(here, records, "r") == scores(there, records, "r")
        here.worker.close()
        there.worker.close()
