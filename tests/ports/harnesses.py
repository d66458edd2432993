"""Every implementation of every port in this repository, behind the harness of its conformance suite.

Each entry builds a fresh harness: a suite's cases share nothing.
"""

import asyncio
import dataclasses
import json
import math
import pickle
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from other_python import other_python
from worker_settings import worker_settings

from rollart.app.progress import ProgressLogger
from rollart.backends.engines.reference import ReferenceEngine
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.models import build_model
from rollart.backends.rewards.host import RewardHost
from rollart.backends.stores.folder import FolderStore
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.shared import SharedMemoryStore
from rollart.backends.stores.tensors import pack
from rollart.backends.trainers.checkpoint import write_file
from rollart.backends.trainers.reference import ReferenceTrainer
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.backends.trainers.worker import TrainerWorker
from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.engine import EngineHarness
from rollart.conformance.environment import EnvironmentHarness
from rollart.conformance.prompts import PromptSourceHarness
from rollart.conformance.reward import RewardHarness
from rollart.conformance.runtime import RuntimeHarness
from rollart.conformance.sink import EventSinkHarness
from rollart.conformance.trainer import TrainerHarness
from rollart.conformance.weights import WeightStoreHarness
from rollart.distributed.inline import InlineRuntime
from rollart.observe.journal import MemoryJournal, SqliteJournal, read_journal
from rollart.ports.environment import TextStep
from rollart.ports.worker import Advance
from rollart.sim.checkpoints import SimCheckpoints
from rollart.sim.engine import SimEngine
from rollart.sim.environment import SimEnvironments
from rollart.sim.faults import Injections
from rollart.sim.hardware import TINY, WIDE
from rollart.sim.loop import run_virtual
from rollart.sim.lossy import LinkFaults, LossyRuntime
from rollart.sim.prompts import CountingPrompts
from rollart.sim.reward import SimReward
from rollart.sim.runtime import VirtualRuntime
from rollart.sim.store import SimStore
from rollart.sim.trainer import SimTrainer
from rollart.sim.workload import TaskProfile
from rollart.tasks.prompt_files import FolderPrompts, JsonLinesPrompts
from rollart.tasks.prompts import SeedPrompts
from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.messages import Save, ScoreRequest, WorkerCommand
from rollart.types.tokens import LOGPROB, TOKEN, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import Prompt, TrainSample, Turn
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, bucket_digest

H = TypeVar("H")
TASK = "conformance"
VOCABULARY = 64
MODEL = {
    "config": {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
}


def run(case: Case[H, None], harness: H) -> None:
    """One case under pytest."""
    try:
        case.run(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))


# --- engines --------------------------------------------------------------------------------------------------------


def profile(**changes: Any) -> TaskProfile:
    values: dict[str, Any] = {
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 30},
        "observation_tokens": {"kind": "uniform", "low": 5, "high": 15},
        "answer_tokens": {"kind": "lognormal", "median": 60, "sigma": 0.8},
        "turns": {"kind": "uniform", "low": 3, "high": 6},
        "reset_s": {"kind": "uniform", "low": 1.0, "high": 50.0},
        "step_s": {"kind": "uniform", "low": 0.5, "high": 1.5},
        "reward_s": {"kind": "uniform", "low": 0.1, "high": 0.5},
    }
    return TaskProfile.model_validate(values | changes)


def simulated_engine(kv_on_update: str) -> EngineHarness:
    store = SimStore()
    settings = {
        "hardware": WIDE,
        "model": TINY,
        "ranks": 1,
        "tasks": {TASK: profile()},
        "seed": 5,
        "store": store,
        "pull_gb_s": 1.0,
        "slots": 4,
        "max_context": 2_000,
        "kv_on_update": kv_on_update,
        "progress_interval_s": 0.02,
    }
    return EngineHarness(
        build=lambda wake: SimEngine(settings, wake),
        publish=lambda version: publish_simulated(store, version),
        tokens=lambda count: Segment(count, None),
        virtual=True,
        corrupt=lambda manifest: store.corrupt(manifest.version, 1),
        long_turn=200,
        task=TASK,
    )


def publish_simulated(store: SimStore, version: Version) -> Manifest:
    buckets = [f"{version}/{index}".encode() for index in range(2)]
    manifest = Manifest(
        version=version,
        parent=None,
        kind=WeightKind.FULL,
        tensors=(),
        bucket_bytes=(10_000_000, 10_000_000),
        digests=tuple(bucket_digest(bucket) for bucket in buckets),
    )
    store.publish(manifest, buckets)
    return manifest


def reference_engine() -> EngineHarness:
    store = MemoryStore()
    settings = {
        "model": MODEL,
        "store": store,
        "slots": 3,
        "max_context": 96,
        "chunk_tokens": 4,
        "progress_interval_s": 0.05,
    }
    return EngineHarness(
        build=lambda wake: ReferenceEngine(worker_settings(ReferenceEngine, settings), wake),
        publish=lambda version: publish_real(store, version),
        tokens=lambda count: Segment.of([(7 * index + 3) % VOCABULARY for index in range(count)]),
        virtual=False,
        corrupt=lambda manifest: corrupt_memory(store, manifest.version, 0),
        every_token=tuple(range(VOCABULARY)),
        long_turn=48,
        task=TASK,
    )


def torch_engine(kv_on_update: str) -> EngineHarness:
    store = MemoryStore()
    settings = {
        "model": MODEL,
        "store": store,
        "slots": 3,
        "max_context": 96,
        "kv_mib": 0.25,
        "prefill_tokens": 16,
        "kv_on_update": kv_on_update,
        "progress_interval_s": 0.05,
    }
    return EngineHarness(
        build=lambda wake: TorchEngine(worker_settings(TorchEngine, settings), wake),
        publish=lambda version: publish_real(store, version),
        tokens=lambda count: Segment.of([(7 * index + 3) % VOCABULARY for index in range(count)]),
        virtual=False,
        corrupt=lambda manifest: corrupt_memory(store, manifest.version, 0),
        every_token=tuple(range(VOCABULARY)),
        long_turn=48,
        task=TASK,
    )


def publish_real(store: MemoryStore, version: Version) -> Manifest:
    model = build_model(MODEL, dtype="float32", device="cpu", seed=1000 * version.epoch + version.step)
    manifest, buckets = pack(model.state_dict(), version=version, parent=None, bucket_bytes=8192)
    store.publish(manifest, buckets)
    return manifest


def corrupt_memory(store: MemoryStore, version: Version, index: int) -> None:
    """Reaches into the store: it has no fault of its own to offer."""
    manifest, buckets = store._versions[version]
    store._versions[version] = (manifest, (*buckets[:index], flipped(buckets[index]), *buckets[index + 1 :]))


ENGINES: dict[str, Callable[[], EngineHarness]] = {
    "sim-recompute": lambda: simulated_engine("recompute"),
    "sim-keep": lambda: simulated_engine("keep"),
    "reference": reference_engine,
    "torch-recompute": lambda: torch_engine("recompute"),
    "torch-keep": lambda: torch_engine("keep"),
}

# --- weight stores --------------------------------------------------------------------------------------------------


def simulated_store(scratch: Path) -> WeightStoreHarness:  # noqa: ARG001 - it writes nothing down
    store = SimStore()
    return WeightStoreHarness(store=store, corrupt=store.corrupt)


def memory_store(scratch: Path) -> WeightStoreHarness:  # noqa: ARG001 - it writes nothing down
    store = MemoryStore()
    return WeightStoreHarness(store=store, corrupt=lambda version, index: corrupt_memory(store, version, index))


def shared_store(scratch: Path) -> WeightStoreHarness:
    """Its own root, so that tests that run at once do not clear each other away."""
    store = SharedMemoryStore.create("conformance", slot_bytes=1 << 16, root=scratch)

    def corrupt(version: Version, index: int) -> None:
        data = bytes(store.bucket(version, index))
        for slot in scratch.glob("rollart-conformance/slot-*"):
            slot.write_bytes(slot.read_bytes().replace(data, flipped(data)))

    return WeightStoreHarness(store=store, corrupt=corrupt, reopen=lambda: pickle.loads(pickle.dumps(store)))


def folder_store(scratch: Path) -> WeightStoreHarness:
    store = FolderStore(scratch / "weights")

    def corrupt(version: Version, index: int) -> None:
        path = scratch / f"weights/step-{version.step:08}.epoch-{version.epoch}/bucket-{index:05}.safetensors"
        data = store.bucket(version, index)
        path.write_bytes(path.read_bytes().replace(data, flipped(data)))

    return WeightStoreHarness(store=store, corrupt=corrupt, reopen=lambda: pickle.loads(pickle.dumps(store)))


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


STORES: dict[str, Callable[[Path], WeightStoreHarness]] = {
    "sim": simulated_store,
    "memory": memory_store,
    "shared": shared_store,
    "folder": folder_store,
}

# --- environments ---------------------------------------------------------------------------------------------------


class Count:
    """A counter that threads share.

    Each harness has its own, known by its number: what a worker of an earlier test still does is not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0
        self.number = len(COUNTS)
        COUNTS.append(self)

    def add(self) -> None:
        with self._lock:
            self.value += 1


COUNTS: list[Count] = []


class Counter:
    """Counts to four, from where the prompt says; fails where it is told to."""

    def __init__(self, count: int, fail: str = "") -> None:
        self._count = COUNTS[count]
        self._fail = fail
        self._number = 0
        self._left = 4

    def reset(self, prompt: Prompt) -> TextStep:
        self._count.add()
        if self._fail == "reset":
            raise RuntimeError("no container left")
        self._number = prompt.seed
        return TextStep(f"count from {self._number}")

    def step(self, action: str) -> TextStep:
        self._count.add()
        if self._fail == "step":
            raise RuntimeError("the container is gone")
        self._number += len(action)
        self._left -= 1
        return TextStep(str(self._number), reward=0.25, done=self._left == 0, artifact=b"end")

    def close(self) -> None:
        pass


def counting(executed: Count, **settings: Any) -> Mapping[str, Any]:
    flat = {
        "task": TASK,
        "environment": f"{Counter.__module__}:Counter",
        "slots": 3,
        "environment_settings": {"count": executed.number, **settings},
    }
    return worker_settings(EnvironmentHost, flat)


def hosted_environments() -> EnvironmentHarness:
    executed = Count()
    return EnvironmentHarness(
        build=lambda wake: EnvironmentHost(counting(executed), wake),
        prompt=prompt,
        action=lambda turn: Segment.of([65 + turn]),
        virtual=False,
        failing_reset=lambda wake: EnvironmentHost(counting(executed, fail="reset"), wake),
        failing_step=lambda wake: EnvironmentHost(counting(executed, fail="step"), wake),
        executed=lambda: executed.value,
    )


def simulated_environments() -> EnvironmentHarness:
    def settings(**changes: Any) -> Mapping[str, Any]:
        return {"task": TASK, "profile": profile(**changes), "slots": 3, "seed": 2}

    return EnvironmentHarness(
        build=lambda wake: SimEnvironments(settings(), wake),
        prompt=prompt,
        action=lambda turn: Segment(turn + 1, None),
        virtual=True,
        failing_reset=lambda wake: SimEnvironments(settings(reset_failure=1.0), wake),
        failing_step=lambda wake: SimEnvironments(settings(step_failure=1.0), wake),
    )


def prompt(seed: int) -> Prompt:
    return Prompt(id=PromptId(str(seed)), task=TASK, seed=seed)


ENVIRONMENTS: dict[str, Callable[[], EnvironmentHarness]] = {
    "sim": simulated_environments,
    "host": hosted_environments,
}

# --- rewards --------------------------------------------------------------------------------------------------------


def judge(question: ScoreRequest) -> Any:
    """The sum of the turns' rewards, unless the artifact wants something else. The prompt's id names the counter."""
    COUNTS[int(question.prompt.id)].add()
    if question.artifact == b"raise":
        raise RuntimeError("429 too many requests")
    wrong: dict[bytes, Any] = {b"nan": math.nan, b"inf": math.inf, b"string": "1.0", b"none": None}
    return wrong.get(question.artifact, sum(question.turn_rewards))


def question(index: int, artifact: bytes = b"") -> ScoreRequest:
    return ScoreRequest(
        key=f"{index}/{artifact.decode()}",
        trajectory=TrajectoryId(index),
        task=TASK,
        prompt=prompt(index),
        turn_rewards=(0.5, float(index)),
        artifact=artifact,
        truncated=False,
    )


def hosted_reward() -> RewardHarness:
    settings = {"function": f"{judge.__module__}:judge", "slots": 2}
    calls = Count()

    def counted(index: int, artifact: bytes = b"") -> ScoreRequest:
        asked = question(index, artifact)
        return msgspec.structs.replace(
            asked, prompt=msgspec.structs.replace(asked.prompt, id=PromptId(str(calls.number)))
        )

    return RewardHarness(
        build=lambda wake: RewardHost(settings, wake),
        question=counted,
        virtual=False,
        failing=counted(0, b"raise"),
        not_finite=tuple(counted(0, artifact) for artifact in (b"nan", b"inf", b"string", b"none")),
        calls=lambda: calls.value,
    )


def simulated_reward(**changes: Any) -> RewardHarness:
    settings = {"tasks": {TASK: profile()}, "seed": 3} | changes
    return RewardHarness(
        build=lambda wake: SimReward(settings, wake),
        question=question,
        virtual=True,
        failing=msgspec.structs.replace(question(9), task="unknown"),
    )


REWARDS: dict[str, Callable[[], RewardHarness]] = {
    "sim": lambda: simulated_reward(slots=2),
    "sim-serverless": lambda: simulated_reward(serverless=True, cold_start_s=5.0, idle_s=10.0),
    "host": hosted_reward,
}

# --- trainers -------------------------------------------------------------------------------------------------------


def batch(number: int, *, real: bool, advantages: tuple[float, float] = (1.0, -1.0)) -> tuple[TrainSample, ...]:
    """A group of two, one better than the other."""
    samples = []
    for member, advantage in enumerate(advantages):
        ids = np.arange(8, dtype=TOKEN) * (member + 2) + number
        sequence = TokenSequence()
        sequence.append_context(Segment.of(ids % VOCABULARY) if real else Segment(8, None))
        tokens = Segment.of((ids + 5) % VOCABULARY) if real else Segment(8, None)
        logprobs = np.full(8, -math.log(VOCABULARY), dtype=LOGPROB).tobytes() if real else None
        sequence.append_sampled(Generated(tokens, logprobs, (VersionRun(Version(0, 0), 8),)))
        samples.append(
            TrainSample(
                trajectory=TrajectoryId(2 * number + member),
                group=GroupId(number),
                task=TASK,
                sequences=(sequence,),
                turns=(Turn(8, advantage, float(member)),),
                reward=float(member),
            )
        )
    return tuple(samples)


class Killed(BaseException):
    """Nothing of a process that is killed handles it, so this is no `Exception`."""


class Knife:
    """Kills the next trainer that saves, in the middle of it."""

    def __init__(self) -> None:
        self.drawn = False

    def draw(self) -> None:
        self.drawn = True

    def cut(self) -> None:
        if self.drawn:
            self.drawn = False
            raise Killed


class CutSimTrainer(SimTrainer):
    """Dies after a `Save` was begun and before it ends."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None], knife: Knife) -> None:
        super().__init__(settings, wake)
        self._knife = knife
        self._saving = False

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        super().post(commands)
        self._saving = any(isinstance(command, Save) for command in commands)

    def advance(self, now: float) -> Advance:
        advance = super().advance(now)
        if self._saving:
            self._knife.cut()
        return advance


def cut(trainer: TrainerWorker, knife: Knife) -> TrainerWorker:
    """It dies after some files of a checkpoint were written. Reaches in: it has no fault of its own to offer."""

    def write(path: Path, data: bytes) -> None:
        if path.name == "optimizer.safetensors":
            knife.cut()
        write_file(path, data)

    assert trainer._checkpoints is not None
    trainer._checkpoints._write = write
    return trainer


def real_trainer(
    scratch: Path, kind: type[ReferenceTrainer] | type[TorchTrainer], bad_batch: tuple[TrainSample, ...], **options: Any
) -> TrainerHarness:
    store, knife = MemoryStore(), Knife()
    settings = {
        "model": MODEL,
        "store": store,
        "learning_rate": 1e-3,
        "bucket_bytes": 8192,
        "checkpoints": str(scratch / "checkpoints"),
        **options,
    }
    return TrainerHarness(
        build=lambda wake: cut(kind(worker_settings(kind, settings), wake), knife),
        store=store,
        batch=lambda number: batch(number, real=True),
        virtual=False,
        bad_batch=bad_batch,
        interrupt_save=knife.draw,
    )


def reference_trainer(scratch: Path) -> TrainerHarness:
    return real_trainer(scratch, ReferenceTrainer, batch(1, real=True, advantages=(math.nan, 1.0)))


def torch_trainer(scratch: Path) -> TrainerHarness:
    return real_trainer(scratch, TorchTrainer, batch(1, real=False), token_budget=20)


def unforgiving_trainer(scratch: Path) -> TrainerHarness:
    """The first step that is not finite stops it."""
    bad = batch(1, real=True, advantages=(math.nan, 1.0))
    return real_trainer(scratch, TorchTrainer, bad, max_skipped=1, dtype="bfloat16")


def ranked_trainer(scratch: Path) -> TrainerHarness:
    """Two processes; a test that uses it makes them start quickly."""
    return real_trainer(scratch, TorchTrainer, batch(1, real=False), token_budget=20, ranks=2)


def adapted_trainer(scratch: Path) -> TrainerHarness:
    """With versions that are merged: those of an adapter cannot be compared by digest over a restart."""
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'rollart[lora]'")
    lora = {"rank": 4, "publish": "merged"}
    return real_trainer(scratch, TorchTrainer, batch(1, real=False), token_budget=20, lora=lora)


def critical_trainer(scratch: Path) -> TrainerHarness:
    """Several steps per claim, with a critic."""
    bad = batch(1, real=False)
    return real_trainer(scratch, TorchTrainer, bad, epochs=2, minibatches=2, critic={"value_learning_rate": 1e-2})


def simulated_trainer(scratch: Path) -> TrainerHarness:  # noqa: ARG001 - it writes nothing down
    store, knife = SimStore(), Knife()
    settings = {
        "hardware": WIDE,
        "model": TINY,
        "ranks": 1,
        "store": store,
        "push_gb_s": 1.0,
        "checkpoints": SimCheckpoints(),
    }
    return TrainerHarness(
        build=lambda wake: CutSimTrainer(settings, wake, knife),
        store=store,
        batch=lambda number: batch(number, real=False),
        virtual=True,
        interrupt_save=knife.draw,
    )


TRAINERS: dict[str, Callable[[Path], TrainerHarness]] = {
    "sim": simulated_trainer,
    "reference": reference_trainer,
    "torch": torch_trainer,
    "torch-bfloat16": unforgiving_trainer,
    "torch-2-ranks": ranked_trainer,
    "torch-lora": adapted_trainer,
    "torch-critic": critical_trainer,
}

# --- prompt sources -------------------------------------------------------------------------------------------------


def seed_prompts() -> PromptSourceHarness:
    return PromptSourceHarness(
        build=lambda: SeedPrompts(TASK, 10, 7, shuffle_seed=1),
        task=TASK,
        pass_length=7,
        foreign=(
            lambda: SeedPrompts("another", 10, 7, shuffle_seed=1),
            lambda: SeedPrompts(TASK, 10, 8, shuffle_seed=1),
            lambda: SeedPrompts(TASK, 10, 7, shuffle_seed=2),
        ),
    )


def json_line_prompts() -> PromptSourceHarness:
    def source(task: str = TASK, rows: int = 7, **options: Any) -> JsonLinesPrompts:
        file = _prompt_folder() / f"{rows}.jsonl"
        file.write_text("".join(json.dumps({"question": number, "of": [rows]}) + "\n" for number in range(rows)))
        return JsonLinesPrompts(task, str(file), **options)

    return PromptSourceHarness(
        build=source,
        task=TASK,
        pass_length=7,
        foreign=(lambda: source("another"), lambda: source(rows=8), lambda: source(shuffle_seed=2)),
    )


def folder_prompts() -> PromptSourceHarness:
    def source(task: str = TASK, word: str = "text", **options: Any) -> FolderPrompts:
        folder = _prompt_folder() / word
        folder.mkdir(exist_ok=True)
        for number in range(5):
            (folder / f"{number}.txt").write_text(f"{word} {number}")
        return FolderPrompts(task, str(folder), **options)

    return PromptSourceHarness(
        build=source,
        task=TASK,
        pass_length=5,
        foreign=(lambda: source("another"), lambda: source(word="other"), lambda: source(shuffle_seed=2)),
    )


def _prompt_folder() -> Path:
    """One for the process; its files are always written alike."""
    return Path(_PROMPT_FILES.name)


_PROMPT_FILES = tempfile.TemporaryDirectory()


def counting_prompts() -> PromptSourceHarness:
    return PromptSourceHarness(
        build=lambda: CountingPrompts(TASK, 10),
        task=TASK,
        foreign=(lambda: CountingPrompts("another", 10), lambda: CountingPrompts(TASK, 11)),
    )


PROMPT_SOURCES: dict[str, Callable[[], PromptSourceHarness]] = {
    "seeds": seed_prompts,
    "json lines": json_line_prompts,
    "folder": folder_prompts,
    "sim": counting_prompts,
}

# --- runtimes -------------------------------------------------------------------------------------------------------


def virtual_runtime(scratch: Path) -> RuntimeHarness:
    return RuntimeHarness(
        build=VirtualRuntime, run=run_virtual, scratch=scratch, within_s=60.0, quiet_s=10.0, threads=False
    )


def inline_runtime(scratch: Path) -> RuntimeHarness:
    return RuntimeHarness(build=InlineRuntime, run=asyncio.run, scratch=scratch, quiet_s=0.05)


def ray_runtime(scratch: Path) -> RuntimeHarness:
    """Needs the fixture `local_ray`. Workers are processes, which take a second to start, more on a busy machine."""
    from rollart.distributed.ray_runtime import RayRuntime  # late: where Ray is missing, the rest is still tested

    return RuntimeHarness(
        build=lambda: RayRuntime(scratch / "logs"),
        run=asyncio.run,
        scratch=scratch,
        within_s=60.0,
        quiet_s=0.3,
        python=other_python(scratch / "other-python"),
    )


def lossy_runtime(scratch: Path, faults: LinkFaults) -> RuntimeHarness:
    """Over a bad link an answer may take as long as several losses and a cut; so may what must not come."""
    return RuntimeHarness(
        build=lambda: LossyRuntime(faults, Injections()),
        run=run_virtual,
        scratch=scratch,
        within_s=120.0,
        quiet_s=30.0,
        threads=False,
    )


PERFECT_LINK = LinkFaults(seed=1, delay_s=0.0)
BAD_LINK = LinkFaults(seed=1, loss=0.2, double=0.1, delay_s=0.2, cut_s=5.0, cut_every_s=20.0)

RUNTIMES: dict[str, Callable[[Path], RuntimeHarness]] = {
    "virtual": virtual_runtime,
    "inline": inline_runtime,
    "ray": ray_runtime,
    "perfect-link": lambda scratch: lossy_runtime(scratch, PERFECT_LINK),
    "bad-link": lambda scratch: lossy_runtime(scratch, BAD_LINK),
}

# --- event sinks ----------------------------------------------------------------------------------------------------


def memory_journal(scratch: Path) -> EventSinkHarness:  # noqa: ARG001 - it writes nothing down
    journal = MemoryJournal()
    return EventSinkHarness(build=lambda: journal, read_back=lambda: list(journal.events), run=run_virtual)


def sqlite_journal(scratch: Path) -> EventSinkHarness:
    path = scratch / "journal.sqlite"

    def fill_the_disk() -> None:
        db = sqlite3.connect(path)
        db.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        db.commit()
        db.close()

    return EventSinkHarness(
        build=lambda: SqliteJournal(path),
        read_back=lambda: list(read_journal(path)),
        run=asyncio.run,
        break_it=fill_the_disk,
    )


def narrated_journal(scratch: Path) -> EventSinkHarness:
    """A sink that tells a person what happens passes everything on."""
    harness = sqlite_journal(scratch)
    return dataclasses.replace(harness, build=lambda: ProgressLogger(harness.build(), lambda _line: None, steps=10))


SINKS: dict[str, Callable[[Path], EventSinkHarness]] = {
    "memory": memory_journal,
    "sqlite": sqlite_journal,
    "narrated": narrated_journal,
}
