"""The simulated parts keep the promises of their ports."""

from collections.abc import Callable
from typing import Any

import pytest
from sim_parts import TASK, engine_settings, profile, prompt, publish

from rollart.ports.conformance import engine, environment, reward, trainer, weights
from rollart.ports.conformance.case import Case, NotApplicable
from rollart.sim.engine import SimEngine
from rollart.sim.environment import SimEnvironments
from rollart.sim.hardware import QWEN3_8B, Hardware
from rollart.sim.reward import SimReward
from rollart.sim.store import SimStore
from rollart.sim.trainer import SimTrainer
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.messages import Score
from rollart.types.tokens import Segment, TokenSequence
from rollart.types.trajectory import TrainSample

BIG = Hardware(name="big", tflops=100.0, hbm_gb=100.0, hbm_tb_s=2.0, nvlink_gb_s=100.0, cost=1.0)


def run(case: Case[Any, None], harness: object) -> None:
    try:
        case.run(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))


def engine_harness(kv_on_update: str) -> engine.EngineHarness:
    store = SimStore()
    settings = engine_settings(
        store, kv_on_update=kv_on_update, tasks={"conformance": profile(answer_tokens=40)}, progress_interval_s=0.004
    )
    return engine.EngineHarness(
        build=lambda wake: SimEngine(settings, wake),
        publish=lambda version: publish(store, version, nominal_bytes=1_000_000),
        tokens=lambda count: Segment(count, None),
        virtual=True,
        corrupt=lambda manifest: store.corrupt(manifest.version, 1),
    )


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
@pytest.mark.parametrize("case", engine.CASES, ids=str)
def test_engine(case: Case[engine.EngineHarness, None], kv_on_update: str) -> None:
    run(case, engine_harness(kv_on_update))


@pytest.mark.parametrize("case", environment.CASES, ids=str)
def test_environment(case: Case[environment.EnvironmentHarness, None]) -> None:
    def building(**changes: float) -> Callable[[Callable[[], None]], SimEnvironments]:
        settings = {"task": TASK, "profile": profile(**changes), "slots": 3, "seed": 2}
        return lambda wake: SimEnvironments(settings, wake)

    harness = environment.EnvironmentHarness(
        build=building(),
        prompt=prompt,
        action=lambda _turn: Segment(9, None),
        virtual=True,
        failing_reset=building(reset_failure=1.0),
        failing_step=building(step_failure=1.0),
    )
    run(case, harness)


@pytest.mark.parametrize("case", weights.CASES, ids=str)
def test_store(case: Case[weights.WeightStoreHarness, None]) -> None:
    store = SimStore()
    run(case, weights.WeightStoreHarness(store=store, corrupt=store.corrupt))


@pytest.mark.parametrize("extra", [{"slots": 3}, {"serverless": True, "cold_start_s": 5.0, "idle_s": 10.0}], ids=str)
@pytest.mark.parametrize("case", reward.CASES, ids=str)
def test_reward(case: Case[reward.RewardHarness, None], extra: dict[str, Any]) -> None:
    settings = {"tasks": {TASK: profile()}, "seed": 1} | extra
    build: Callable[[Callable[[], None]], SimReward] = lambda wake: SimReward(settings, wake)  # noqa: E731

    def question(index: int) -> Score:
        return Score(str(index), TrajectoryId(index), TASK, prompt(index), (0.0, float(index)), b"", False)

    run(case, reward.RewardHarness(build=build, question=question, virtual=True))


@pytest.mark.parametrize("case", trainer.CASES, ids=str)
def test_trainer(case: Case[trainer.TrainerHarness, None]) -> None:
    store = SimStore()
    settings = {"hardware": BIG, "model": QWEN3_8B, "ranks": 2, "store": store, "push_gb_s": 10.0}

    def batch(index: int) -> tuple[TrainSample, ...]:
        sequence = TokenSequence()
        sequence.append_context(Segment(100 + index, None))
        return (TrainSample(TrajectoryId(index), GroupId(1), TASK, (sequence,), 1.0, 1.0),)

    harness = trainer.TrainerHarness(
        build=lambda wake: SimTrainer(settings, wake), store=store, batch=batch, virtual=True, weights_change=False
    )
    run(case, harness)
