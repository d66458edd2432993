"""On-policy distillation, a pipeline of one's own: a student writes, a teacher judges every token of it.

    rollart cluster up --nodes cpu=1,H800=1,H20=1 --num-gpus 2
    python examples/distillation.py
    rollart cluster down

    Student (H20): torch engine ──► texts ──► Teacher (H20): log-probability of every token
       ▲                                            │ advantage of a token = log p_teacher − log p_student
       └── weights (one copy per node) ◄── Trainer (H800): torch trainer ◄─┘

A token that the teacher finds likelier than the student is made likelier, and the mean of the advantages is minus the
student's KL divergence from the teacher, on the texts that the student itself writes.
"""

import sys

import numpy as np
import torch

from rollart.backends.models import build_model
from rollart.config.pools import PoolSettings
from rollart.config.training import TrainerSettings
from rollart.distributed.cluster import Cluster
from rollart.distributed.code_travel import code_of_this_process
from rollart.distributed.hosted import Hosted
from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.ray_weights import ray_weights
from rollart.distributed.resources import ResourceManager
from rollart.distributed.worker import Worker, hw_mapping, register
from rollart.types.messages import (
    Add,
    EndSession,
    Publish,
    Published,
    Sampling,
    Stage,
    Staged,
    Train,
    Trained,
    TurnDone,
    Update,
    Updated,
)
from rollart.types.tokens import Segment, TokenSequence
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

MODEL = {
    "config": {
        "model_type": "qwen3",
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # so that teacher and student differ
    }
}
TEXTS, TOKENS, TEACHER_SEED = 64, 16, 1


class Student(Worker):
    """Samples texts with the newest weights."""

    def __init__(self, store):
        engine = "rollart.backends.engines.torch_engine:TorchEngine"
        self.engine = Hosted(engine, model=MODEL, store=store, pool=PoolSettings(kv_mib=8), progress_interval_s=3600.0)
        self.texts = 0

    @register()
    def update(self, manifest):
        self.engine.ask([Stage(manifest)], Staged)
        self.engine.ask([Update(manifest.version)], Updated)

    @register(mode="shard")
    def write(self, prompts):
        first = self.texts + 1
        self.texts += len(prompts)
        asked = {
            first + index: Add(
                first + index, first + index, "distil", 0, b"", Segment.of([prompt]),
                Sampling(TOKENS, seed=self.rank * 10**6 + first + index),
            )
            for index, prompt in enumerate(prompts)
        }  # fmt: skip
        texts = {number: TokenSequence() for number in asked}
        for done in self.engine.ask(list(asked.values()), TurnDone, len(asked)):
            texts[done.request].append_context(asked[done.request].new)
            texts[done.request].append_sampled(done.generated)
        self.engine.ask([EndSession(number) for number in asked], TurnDone, 0)
        return list(texts.values())


class Teacher(Worker):
    def __init__(self):
        self.model = build_model(MODEL, dtype="float32", device="cpu", seed=TEACHER_SEED)

    @hw_mapping(hw_affinity={"default": "H20"})
    def judge(self, texts, tag_name="default"):
        """Log-probability of every sampled token."""
        tokens = torch.tensor(np.stack([text.whole().ids() for text in texts]), dtype=torch.long)
        with torch.inference_mode():
            logprobs = self.model(tokens).logits[:, :-1].float().log_softmax(-1)
        return list(logprobs.gather(-1, tokens[:, 1:, None])[..., 0].numpy())


class Trainer(Worker):
    def __init__(self, store):
        trainer = "rollart.backends.trainers.torch_trainer:TorchTrainer"
        settings = TrainerSettings(learning_rate=1e-2)
        self.trainer = Hosted(trainer, model=MODEL, store=store, trainer=settings)

    @register(mode="execute_rank_zero")
    def publish(self, step):
        (published,) = self.trainer.ask([Publish(Version(0, step))], Published)
        return published.manifest

    @register(mode="execute_rank_zero")
    def train(self, step, texts, advantages):
        samples = tuple(
            TrainSample(number, 0, "distil", (text,), tuple(Turn(1, float(each)) for each in own), 0.0)
            for number, (text, own) in enumerate(zip(texts, advantages, strict=True))
        )  # every token is a turn of its own, with an advantage of its own
        self.trainer.ask([Train(step, Version(0, step), samples)], Trained)


def main(address="auto", steps=60):
    manager = ResourceManager({"H800": 1}, {"H20": 2})
    with (
        RayCluster(address, code_of_this_process()),
        ray_weights("distillation", slot_bytes=2**22) as store,
        Cluster(Trainer, 1, store, resources=manager, role="train") as trainer,
        Cluster(Student, 1, store, resources=manager, role="generation") as student,
        Cluster(Teacher, 1, resources=manager, role="generation") as teacher,
    ):
        for step in range(int(steps)):
            student.update(trainer.publish(step))
            texts = student.write([number % 16 for number in range(TEXTS)])
            wanted = teacher.judge(texts)
            advantages = [own - text.logprobs()[text.action_mask()] for own, text in zip(wanted, texts, strict=True)]
            if step % 10 == 0 or step == int(steps) - 1:
                print(f"step {step}: KL of the student from the teacher {-np.mean(advantages):.3f}", flush=True)
            trainer.train(step + 1, texts, advantages)


if __name__ == "__main__":
    main(*sys.argv[1:])
