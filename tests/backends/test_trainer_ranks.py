"""The torch trainer on several ranks: together they compute, save, load and fail like one trainer."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_parts import names
from msgspec.structs import replace
from packed_parts import samples
from parts import PATIENCE_S, TINY, V1, V2, Driver
from safetensors.torch import load_file
from test_torch_trainer import SETTINGS, levelled, poisoned, train
from transformers import AutoModelForCausalLM

import rollart
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import unpack
from rollart.backends.trainers import child_ranks, ranks
from rollart.backends.trainers.child_ranks import ChildRanks
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.types.errors import RequestError, TrainerLost
from rollart.types.messages import Publish, Save, Saved, Trained, TrainerFailed
from rollart.types.rank_shares import split

CLOSE = 1e-4
quickly = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture
def trainer():
    """Builds trainers, which are closed at the end."""
    built = []

    def build(count=2, store=None, **settings):
        driver = Driver(TorchTrainer, {**SETTINGS, "store": store or MemoryStore(), "ranks": count, **settings})
        built.append(driver)
        return driver

    yield build
    for driver in built:
        driver.worker.close()


def weights(driver):
    return {name: tensor.clone() for name, tensor in driver.worker._snapshot().items()}


def distance(left, right):
    assert left.keys() == right.keys()
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)


def agree(left, right):
    """Check that two `Trained` events have the same metrics, except those of the partition."""
    assert isinstance(left, Trained), left
    assert isinstance(right, Trained), right
    for name in left.metrics.keys() - {"micro_batches", "fed_tokens"}:
        assert right.metrics[name] == pytest.approx(left.metrics[name], rel=CLOSE, abs=CLOSE), name
    assert left.metrics.keys() == right.metrics.keys()


def rewarded(batch):
    """With rewards that differ: without any, a critic has nothing to learn and no gradient."""
    return tuple(
        replace(sample, turns=tuple(replace(turn, reward=0.5 + number % 3) for turn in sample.turns))
        for number, sample in enumerate(batch)
    )


def processes(driver):
    return [process.pid for process in driver.worker._ranks._group._processes.values()]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@quickly
@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {}),
        (2, {"token_budget": 40}),
        (3, {"token_budget": 60, "gradient_checkpointing": True, "max_grad_norm": 0.5}),
        (2, {"loss": {"kl_weight": 0.3, "entropy_weight": 0.01}}),
        (2, {"loss": {"kind": "gspo", "correction": {"kind": "truncate"}}, "weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_one_process(trainer, count, options):
    one, many = trainer(1, **options), trainer(count, **options)
    assert distance(weights(one), weights(many)) == 0.0
    batches = [
        samples(1),
        samples(2),
        samples(3)[4:5],  # fewer sequences than ranks
        (samples()[-1],),  # nothing to train
        poisoned(),  # skipped by all
        samples(4)[:4],  # one prompt for all
        levelled(samples(5), keep=2),  # most are only measured
        samples(6),
    ]
    for step, batch in enumerate(batches, 1):
        before = weights(many)
        left, right = train(one, step, batch), train(many, step, batch)
        agree(left, right)
        assert (distance(before, weights(many)) == 0.0) == (step in (4, 5))
        assert distance(weights(one), weights(many)) <= CLOSE
    assert many.worker.info() == one.worker.info()


@quickly
@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 2, "minibatches": 2, "token_budget": 40, "loss": {"correction": {"kind": "truncate"}}},
        {"critic": {"value_learning_rate": 1e-2}, "token_budget": 60},
        {"critic": {"value_learning_rate": 1e-2, "whiten": True}, "minibatches": 2},
    ],
    ids=["steps", "critic", "both"],
)
def test_claims_of_several_steps_and_with_a_critic_are_too(trainer, options):
    one, many = trainer(1, **options), trainer(2, **options)
    for step, batch in enumerate([samples(1), samples(2), samples(3)[4:5], samples(4)], 1):
        batch = rewarded(batch)
        agree(train(one, step, batch), train(many, step, batch))
        assert distance(weights(one), weights(many)) <= CLOSE


@quickly
def test_bfloat16_layers_have_float32_weights(trainer):
    """Numbers of bfloat16 differ by its rounding; what is trained and published is of the same kind."""
    store = MemoryStore()
    one, many = trainer(1, dtype="bfloat16"), trainer(2, store, dtype="bfloat16")
    for step in (1, 2):
        left, right = train(one, step), train(many, step)
        assert right.metrics["loss"] == pytest.approx(left.metrics["loss"], rel=0.05)
        assert right.metrics["grad_norm"] == pytest.approx(left.metrics["grad_norm"], rel=0.05)
    assert {parameter.dtype for parameter in many.worker._model.parameters()} == {torch.float32}
    (published,) = many.call(Publish(V2))
    assert {entry.dtype for entry in published.manifest.tensors} == {"bfloat16"}


@quickly
@pytest.mark.parametrize("count", [1, 2])
def test_gradient_checkpointing_gives_the_same_step(trainer, count):
    plain = trainer(count)
    expected = [train(plain, step).metrics for step in (1, 2)]
    kept = weights(plain)
    plain.worker.close()
    checkpointing = trainer(count, gradient_checkpointing=True)
    assert [train(checkpointing, step).metrics for step in (1, 2)] == expected
    assert distance(weights(checkpointing), kept) == 0.0


@quickly
def test_a_rank_holds_its_part_only(trainer):
    driver = trainer(2)
    train(driver, 1)
    total = driver.worker.info().parameters
    held = [parameter.to_local().numel() for parameter in driver.worker._model.parameters()]
    assert sum(held) == pytest.approx(total / 2, rel=0.05)
    moments = [state["exp_avg"].to_local().numel() for state in driver.worker._optimizer.state.values()]
    assert moments == held


@quickly
def test_versions_are_those_of_one_process(trainer):
    store = MemoryStore()
    one, many = trainer(1, store), trainer(2)
    (left,), (right,) = one.call(Publish(V1)), many.call(Publish(V1))
    assert right == left  # names, order, bytes, and the tied head once
    train(many, 2)
    (moved,) = many.call(Publish(V2))
    held = many.worker._settings.store
    out = unpack(moved.manifest, [held.bucket(V2, index) for index in range(len(moved.manifest.digests))])
    assert distance(out, weights(many)) == 0.0
    assert moved.manifest.digests != right.manifest.digests


@quickly
def test_a_refused_batch_leaves_all_ranks_as_they_were(trainer):
    driver = trainer(2, max_skipped=1)
    train(driver, 1)
    before = weights(driver)
    broken = samples()[0]
    broken.sequences[0]._logprobs = None
    assert isinstance(train(driver, 2, (broken,)), TrainerFailed)
    assert "advantage nan" in train(driver, 3, poisoned()).reason  # this one all ranks refuse, after they computed it
    assert distance(before, weights(driver)) == 0.0
    assert isinstance(train(driver, 4), Trained)
    fresh = trainer(1)
    train(fresh, 1)
    train(fresh, 4)
    assert distance(weights(driver), weights(fresh)) <= CLOSE


@quickly
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_is_for_any_number_of_ranks(trainer, before, after, tmp_path):
    options = {"weight_decay": 0.01, "schedule": {"warmup_steps": 4}}
    unstopped = trainer(before, checkpoints=str(tmp_path), **options)
    for step in (1, 2):
        train(unstopped, step)
    assert unstopped.call(Save(V2)) == [Saved(V2)]
    expected = [train(unstopped, step) for step in (3, 4)]
    kept = weights(unstopped)
    unstopped.worker.close()
    later = trainer(after, checkpoints=str(tmp_path), seed=99, **options)
    assert later.worker.info().restored == V2
    found = [train(later, step) for step in (3, 4)]
    for left, right in zip(expected, found, strict=True):
        agree(left, right)
    assert distance(kept, weights(later)) <= CLOSE
    if before == after:
        assert found == expected  # to the last bit
        assert distance(kept, weights(later)) == 0.0


@quickly
def test_a_checkpoint_has_the_files_of_one_process(trainer, tmp_path):
    for count in (1, 2):
        driver = trainer(count, checkpoints=str(tmp_path / str(count)))
        train(driver, 1)
        assert driver.call(Save(V1)) == [Saved(V1)]
        (kept,) = (tmp_path / str(count)).iterdir()
        model = AutoModelForCausalLM.from_pretrained(kept)
        assert distance(dict(model.state_dict()), weights(driver)) == 0.0
        assert type(model).__name__ == "Qwen3ForCausalLM"
    one, two = tmp_path / "1" / "step-00000001.epoch-0", tmp_path / "2" / "step-00000001.epoch-0"
    assert names(one) == names(two)
    for name in ("model.safetensors", "optimizer.safetensors"):
        left, right = load_file(one / name), load_file(two / name)
        assert {key: value.shape for key, value in left.items()} == {key: value.shape for key, value in right.items()}
        assert distance(left, right) <= CLOSE


@quickly
def test_a_disk_that_is_full_leaves_all_ranks_usable(trainer, tmp_path):
    driver = trainer(2, checkpoints=str(tmp_path))
    train(driver, 1)

    def full(path, data):  # noqa: ARG001
        raise OSError("no space left")

    driver.worker._checkpoints._write = full
    (failed,) = driver.call(Save(V1))
    assert "no space left" in failed.reason
    assert isinstance(train(driver, 2), Trained)


class CountingRanks(ChildRanks):
    """Counts the bytes of shares by rank."""

    def __init__(self):
        self.sent = {}

    def start(self, order, listener):
        group = super().start(order, listener)
        send = group.call

        def call(rank, call, share=None):
            assert len(call) < 2000
            self.sent[rank] = self.sent.get(rank, 0) + (0 if share is None else len(pickle.dumps(share)))
            send(rank, call, share)

        group.call = call
        return group


@quickly
def test_a_batch_is_sent_once_and_not_to_every_rank(trainer):
    starter = CountingRanks()
    driver = trainer(4, rank_starter=starter, token_budget=4096)
    batch = tuple(replace(each, trajectory=30 * seed + each.trajectory) for seed in range(8) for each in samples(seed))
    assert isinstance(train(driver, 1, batch), Trained)
    whole = len(pickle.dumps(split(batch, 1, 1)[0]))
    assert starter.sent.keys() == {1, 2, 3}
    for sent in starter.sent.values():
        assert sent == pytest.approx(whole / 4, rel=0.2)
    assert sum(starter.sent.values()) < whole


@quickly
def test_nothing_of_the_ranks_listens_but_on_their_network(trainer):
    driver = trainer(2)
    train(driver, 1)
    inodes = {os.readlink(fd) for pid in (os.getpid(), *processes(driver)) for fd in opened(pid)}
    found = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [entry[1] for entry in found if entry[3] == "0A" and f"socket:[{entry[9]}]" in inodes]
    assert len(listening) >= 3  # the store, and gloo of each
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}


def opened(pid):
    return [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]


# --- ranks that are lost


def lost(driver, act):
    """The error that ends the worker; no rank process is left."""
    pids = processes(driver)
    with pytest.raises(TrainerLost) as raised:
        act()
    until_gone(pids)
    return str(raised.value)


def until_gone(pids):
    deadline = time.monotonic() + PATIENCE_S
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived the trainer"
        time.sleep(0.05)


def until_it_dies(driver):
    while True:
        assert driver.woken.wait(PATIENCE_S)
        driver.slice()


@quickly
def test_a_rank_that_dies_while_nothing_happens_is_noticed(trainer):
    driver = trainer(3)
    train(driver, 1)
    os.kill(processes(driver)[1], signal.SIGKILL)
    cause = lost(driver, lambda: until_it_dies(driver))
    assert "rank 2 of 3" in cause
    assert "SIGKILL" in cause
    with pytest.raises(TrainerLost, match="rank 2 of 3"):  # dead it stays
        driver.slice()


@quickly
def test_a_rank_that_dies_in_a_step_is_named(trainer):
    driver = trainer(3)
    train(driver, 1)
    culprit = processes(driver)[1]
    os.kill(culprit, signal.SIGSTOP)  # the others now wait for it in the middle of the step
    threading.Timer(1.0, os.kill, (culprit, signal.SIGKILL)).start()
    cause = lost(driver, lambda: train(driver, 2))
    assert "rank 2 of 3" in cause  # and not rank 1, which it took along
    assert "SIGKILL" in cause


@quickly
def test_a_step_does_not_wait_for_a_rank_whose_machine_vanished(trainer):
    """Such a machine closes no connection: gloo would wait for its timeout."""
    driver = trainer(3)
    train(driver, 1)
    os.kill(processes(driver)[1], signal.SIGSTOP)
    vanished = ranks.Failure("its node is dead")
    threading.Timer(1.0, driver.worker._ranks.ended, (2, vanished)).start()
    cause = lost(driver, lambda: train(driver, 2))
    assert "rank 2 of 3" in cause
    assert "its node is dead" in cause


@quickly
@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_rank_that_raises_is_named_with_its_error(trainer, in_a_step):
    driver = trainer(2)
    train(driver, 1)
    driver.worker._ranks._group.call(1, pickle.dumps(("_restore_everywhere", ("no checkpoint",))))
    cause = lost(driver, lambda: train(driver, 2) if in_a_step else until_it_dies(driver))
    assert "rank 1 of 2" in cause
    assert "AttributeError: 'str' object has no attribute" in cause


@quickly
def test_after_a_loss_the_next_trainer_goes_on(trainer, tmp_path):
    driver = trainer(2, checkpoints=str(tmp_path))
    train(driver, 1)
    driver.call(Save(V1))
    os.kill(processes(driver)[0], signal.SIGKILL)
    lost(driver, lambda: until_it_dies(driver))
    later = trainer(2, checkpoints=str(tmp_path))
    assert later.worker.info().restored == V1
    assert isinstance(train(later, 2), Trained)


def test_a_rank_that_does_not_start_is_named_with_its_last_words(trainer, monkeypatch):
    def broken(end, log, rank):  # noqa: ARG001
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit('no such GPU')"], stderr=log)

    monkeypatch.setattr(child_ranks, "start_process", broken)
    with pytest.raises(TrainerLost, match=r"rank 1 of 2 .*exit code 1; last output: no such GPU"):
        trainer(2)


@quickly
def test_what_one_process_refuses_several_refuse(trainer, tmp_path):
    with pytest.raises(RequestError, match="not a folder with a config"):
        trainer(2, model="/nowhere")
    small = trainer(2, checkpoints=str(tmp_path))
    train(small)
    small.call(Save(V1))
    small.worker.close()
    larger = {"config": TINY["config"] | {"num_hidden_layers": 3}}
    with pytest.raises(RequestError, match="does not fit this model"):
        trainer(2, model=larger, checkpoints=str(tmp_path))
    assert isinstance(train(trainer(2)), Trained)  # nothing was left behind that is in its way


@quickly
def test_a_process_has_one_trainer_with_ranks(trainer, monkeypatch):
    monkeypatch.setattr(ranks, "ANOTHER_S", 0.1)
    first = trainer(2)
    with pytest.raises(RequestError, match="already"):
        trainer(2)
    assert isinstance(train(first), Trained)


def test_ranks_need_a_device_each(trainer):
    with pytest.raises(RequestError, match="cannot share 'cuda:1'"):
        trainer(2, device="cuda:1")
    if torch.cuda.device_count() < 2:
        with pytest.raises(RequestError, match="one GPU each"):
            trainer(2, device="cuda")


ENDLESS = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_trainer_ranks import *
driver = Driver(TorchTrainer, {{**SETTINGS, "store": MemoryStore(), "ranks": 2}})
train(driver, 1)
print(*processes(driver), flush=True)
step = 1
while True:
    step += 1
    assert isinstance(train(driver, step), Trained)
"""


def test_ranks_end_with_a_rank_0_that_is_killed():
    """Real processes, as a run starts them."""
    sources = Path(rollart.__file__).parents[1]
    worker = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{Path(__file__).parents[1]}"},
    )
    try:
        assert worker.stdout is not None
        pids = [int(pid) for pid in worker.stdout.readline().split()]
        assert len(pids) == 1
        assert runs(pids[0])
        assert Path(f"/proc/{pids[0]}/comm").read_text() == "trainer rank 1\n"
    finally:
        worker.kill()
        worker.wait()
    until_gone(pids)
