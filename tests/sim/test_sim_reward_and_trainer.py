"""Simulated rewards and training: latency, queueing, cold starts, and versions that engines can take."""

from typing import Any

import pytest
from sim_parts import TASK, Driver, engine_settings, profile, prompt

from rollart.sim.engine import SimEngine
from rollart.sim.hardware import H800, QWEN3_8B, Roofline
from rollart.sim.reward import SimReward
from rollart.sim.store import SimStore
from rollart.sim.trainer import SimTrainer
from rollart.types.ids import ClaimId, GroupId, TrajectoryId
from rollart.types.messages import (
    EpisodeRecord,
    Publish,
    Published,
    Scored,
    ScoreFailed,
    ScoreRequest,
    Stage,
    Staged,
    Train,
    Trained,
    TrainerFailed,
)
from rollart.types.tokens import Segment, TokenSequence
from rollart.types.trajectory import TrainSample
from rollart.types.versions import Version


def rewarding(**extra: Any) -> Driver:
    return Driver(SimReward({"tasks": {TASK: profile(reward_s=2.0)}, "seed": 1} | extra, lambda: None))


def score(key: str, *rewards: float, task: str = TASK) -> ScoreRequest:
    return ScoreRequest(key, task, "", (EpisodeRecord(TrajectoryId(1), prompt(1).seed, rewards),))


def times(driver: Driver) -> dict[str, float]:
    return {event.key: at for at, event in driver.log if isinstance(event, Scored)}


def test_a_few_slots_answer_in_order() -> None:
    driver = rewarding(slots=2)
    driver.send(*(score(key, 0.0, 1.0) for key in "abcde"), score("a"))
    driver.run()
    assert times(driver) == {"a": 2.0, "b": 2.0, "c": 4.0, "d": 4.0, "e": 6.0}
    assert {event.values for event in driver.events(Scored)} == {(1.0,)}


def test_a_late_call_keeps_the_queue_moving() -> None:
    driver = rewarding(slots=1)
    driver.send(score("a"), score("b"), score("c"))
    driver.now = 5.0
    assert [type(event) for event in driver.send()] == [Scored, Scored]
    assert driver.wake_at == 6.0


def test_serverless_scales_out_and_to_zero() -> None:
    driver = rewarding(serverless=True, cold_start_s=10.0, idle_s=30.0)
    driver.send(*(score(key) for key in "abc"))
    driver.run(until=4.0)
    driver.send(score("d"))
    driver.run(until=40.0)
    driver.send(score("e"))
    driver.run(until=80.0)
    driver.send(score("f"))
    driver.run()
    assert times(driver) == {"a": 12.0, "b": 12.0, "c": 12.0, "d": 12.0, "e": 42.0, "f": 92.0}


def test_an_unknown_task_has_no_reward() -> None:
    (failed,) = rewarding(slots=1).send(score("a", task="unheard"))
    assert isinstance(failed, ScoreFailed)
    assert not failed.retry


def training(store: SimStore, **options: int) -> Driver:
    settings = {"hardware": H800, "model": QWEN3_8B, "ranks": 32, "store": store, "push_gb_s": 2.0, **options}
    return Driver(SimTrainer(settings, lambda: None))


def train(claim: int, *lengths: int, masked: int = 0) -> Train:
    samples = []
    for index, length in enumerate((*lengths, masked)):
        sequence = TokenSequence()
        sequence.append_context(Segment(length, None))
        samples.append(
            TrainSample(TrajectoryId(index), GroupId(1), TASK, (sequence,), (), 1.0, masked=index == len(lengths))
        )
    return Train(ClaimId(claim), Version(0, claim), tuple(samples))


def test_training_and_publishing_take_their_time_one_after_another() -> None:
    driver = training(SimStore())
    driver.send(Publish(Version(0, 0)), train(1, 1_000_000, 500_000, masked=7_000_000), Publish(Version(0, 1)))
    driver.run()
    push_s = QWEN3_8B.weight_bytes / 2e9
    train_s = Roofline(H800, QWEN3_8B, 32).train_s(1_500_000) * 4 / 3
    assert [at for at, _ in driver.log] == pytest.approx([push_s, push_s + train_s, 2 * push_s + train_s])
    assert driver.events(Trained)[0].metrics == {"tokens": 1_500_000.0, "loss": 0.0}


def test_every_epoch_takes_its_time() -> None:
    """The pass before the first update is made once, however often the batch is trained on."""
    driver = training(SimStore(), epochs=3)
    driver.send(train(1, 1_500_000))
    driver.run()
    once_s = Roofline(H800, QWEN3_8B, 32).train_s(1_500_000)
    assert driver.log[0][0] == pytest.approx(3 * once_s + once_s / 3)


def test_a_claim_is_trained_once() -> None:
    driver = training(SimStore())
    driver.send(train(1, 1_000_000), train(1, 1_000_000))
    driver.run()
    assert len(driver.log) == 1
    assert driver.send(train(1, 1_000_000)) == [driver.log[0][1]]


def test_buckets_are_nominal_and_engines_verify_what_is_stored() -> None:
    store = SimStore()
    driver = training(store)
    driver.send(Publish(Version(0, 0)))
    driver.run()
    (published,) = driver.events(Published)
    manifest = published.manifest
    assert manifest.total_bytes == QWEN3_8B.weight_bytes
    assert len(manifest.bucket_bytes) == 17
    assert max(manifest.bucket_bytes) == 1_000_000_000
    engine = Driver(SimEngine(engine_settings(store, pull_gb_s=4.0), lambda: None))
    engine.send(Stage(manifest))
    engine.run()
    assert engine.log == [(pytest.approx(manifest.total_bytes / 4e9), Staged(Version(0, 0)))]


def test_a_restarted_trainer_cannot_publish_an_old_version() -> None:
    store = SimStore()
    first, second = training(store), training(store)
    first.send(Publish(Version(0, 3)))
    first.run()
    (failed,) = second.send(Publish(Version(0, 3)))
    assert isinstance(failed, TrainerFailed)
    assert "only grow" in failed.reason
    second.send(Publish(Version(1, 0)))
    second.run()
    assert store.newest() == Version(1, 0)
