"""Simulated checkpoints: saving takes its time, and what was not saved to the end is not there."""

from typing import Any

import pytest
from sim_parts import Driver

from rollart.sim.checkpoints import SimCheckpoints
from rollart.sim.hardware import H800, QWEN3_8B
from rollart.sim.store import SimStore
from rollart.sim.trainer import SimTrainer
from rollart.types.errors import InvariantBroken
from rollart.types.ids import ClaimId
from rollart.types.messages import Publish, Published, Save, Saved, SaveFailed, Train, TrainerInfo
from rollart.types.versions import Version

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)


def training(checkpoints: SimCheckpoints | None, store: SimStore | None = None, **extra: Any) -> Driver:
    settings = {"hardware": H800, "model": QWEN3_8B, "ranks": 32, "store": store or SimStore(), "push_gb_s": 2.0}
    return Driver(SimTrainer(settings | {"checkpoints": checkpoints} | extra, lambda: None))


def restored(checkpoints: SimCheckpoints) -> Version | None:
    info = training(checkpoints).worker.info()
    assert isinstance(info, TrainerInfo)
    return info.restored


def train(step: int) -> Train:
    """Without tokens, so that it takes no time."""
    return Train(ClaimId(step), Version(0, step), ())


def test_saving_takes_its_time_in_the_queue() -> None:
    driver = training(SimCheckpoints(), save_s=5.0)
    driver.send(train(1), Save(V1), Save(V1), train(2), Save(V2))
    driver.run()
    assert [(at, event.version) for at, event in driver.log if isinstance(event, Saved)] == [(5.0, V1), (10.0, V2)]
    driver.send(Save(V2))
    assert driver.log[-1] == (10.0, Saved(V2)), "a doubled one is answered from memory"


def test_by_default_it_takes_the_bytes_of_weights_and_optimiser() -> None:
    driver = training(SimCheckpoints())
    driver.send(train(1), Save(V1))
    driver.run()
    assert driver.log[-1][0] == pytest.approx((2 + 12) * QWEN3_8B.params / 32e9)


def test_of_a_trainer_that_goes_while_it_saves_the_checkpoint_before_stays() -> None:
    checkpoints = SimCheckpoints()
    driver = training(checkpoints, save_s=5.0)
    driver.send(train(1), Save(V1), train(2), Save(V2))
    driver.run(until=4.9)
    assert restored(checkpoints) is None
    driver.run(until=9.9)
    assert restored(checkpoints) == V1
    driver.worker.close()
    driver.run()
    assert restored(checkpoints) == V1


def test_a_restored_trainer_has_the_history_of_its_checkpoint() -> None:
    checkpoints, store = SimCheckpoints(), SimStore()
    first = training(checkpoints, store)
    first.send(Publish(V0), train(1), Publish(V1), Save(V1), train(2), Publish(V2))
    first.run()
    second = training(checkpoints, store)
    second.send(Publish(Version(1, 1)), Train(ClaimId(3), Version(1, 2), ()), Publish(Version(1, 2)))
    second.run()
    digests = [event.manifest.digests for event in (*first.events(Published), *second.events(Published))]
    assert digests[1] == digests[3]
    assert len(set(digests)) == 4, "another claim makes other weights, at the same step too"


def test_what_cannot_be_saved_fails_at_once_and_with_a_reason() -> None:
    without = training(None)
    without.send(train(1), Save(V1))
    (failed,) = without.events(SaveFailed)
    assert "set `checkpoints`" in failed.reason
    checkpoints = SimCheckpoints()
    checkpoints.complete(Version(1, 1), "…")
    driver = training(checkpoints)
    driver.send(train(2), Save(V1), Save(V2))
    reasons = [event.reason for event in driver.events(SaveFailed)]
    assert ["v0.2" in reasons[0], "only grow" in reasons[1]] == [True, True]
    with pytest.raises(InvariantBroken):
        checkpoints.complete(V2, "…")
