"""All reference backends under the inline runtime: two rounds of FrozenLake, with the smallest controller there is."""

import asyncio

from rollart.backends.environments.codec import ByteCodec
from rollart.backends.stores.memory import MemoryStore
from rollart.config.pools import PoolSettings
from rollart.config.tasks import TaskSettings
from rollart.distributed.inline import InlineRuntime
from rollart.tasks.prompts import SeedPrompts
from rollart.types.messages import (
    Add,
    Close,
    EpisodeRecord,
    Observed,
    Publish,
    Published,
    Reset,
    Role,
    Sampling,
    Scored,
    ScoreRequest,
    Stage,
    Staged,
    Step,
    Train,
    Trained,
    TurnDone,
    Update,
    Updated,
)
from rollart.types.tokens import TokenSequence
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

MAX_TURNS = 3
MODEL = {
    "config": {
        "model_type": "qwen3",
        "vocab_size": 264,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
}


class Controller:
    """Posts a command and waits for the one event that answers it."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.waits = []
        self.deaths = []
        self.members = {}

    def joined(self, worker, info):
        self.members[worker] = info

    def events(self, worker, events):  # noqa: ARG002 - a Listener's signature
        for event in events:
            for wait in list(self.waits):
                condition, future = wait
                if condition(event):
                    self.waits.remove(wait)
                    future.set_result(event)

    def died(self, worker, reason):
        self.deaths.append((worker, reason))

    async def ask(self, worker, command, kind, **fields):
        def answers(event):
            return type(event) is kind and all(getattr(event, name) == value for name, value in fields.items())

        future = asyncio.get_running_loop().create_future()
        self.waits.append((answers, future))
        self.runtime.post(worker, [command])
        return await asyncio.wait_for(future, 100)

    async def sync(self, version):
        manifest = (await self.ask("trainer", Publish(version), Published)).manifest
        await self.ask("engine", Stage(manifest), Staged, version=version)
        await self.ask("engine", Update(version), Updated, version=version)

    async def episode(self, number, prompt, requests):
        log = TokenSequence()
        rewards = []
        observed = await self.ask("environment", Reset(number, number % 4, prompt, 0), Observed, episode=number, turn=0)
        turn = 0
        while True:
            log.append_context(observed.observation)
            if observed.done or turn == MAX_TURNS:
                break
            turn += 1
            request = next(requests)
            add = Add(
                request,
                number,
                "frozenlake",
                log.turn_length,
                log.turn_digest,
                log.since_turn(),
                Sampling(max_tokens=3, stop_tokens=ByteCodec.stop_tokens, seed=request),
            )
            done = await self.ask("engine", add, TurnDone, request=request)
            log.append_sampled(done.generated)
            step = Step(number, turn, done.generated.tokens)
            observed = await self.ask("environment", step, Observed, episode=number, turn=turn)
            rewards.append(observed.reward)
        self.runtime.post("environment", [Close(number)])
        key = f"score/{number}"
        episode = EpisodeRecord(number, prompt.seed, tuple(rewards), not observed.done)
        question = ScoreRequest(key, "frozenlake", "episode_return", (episode,))
        value = (await self.ask("reward", question, Scored, key=key)).values[0]
        turns = (Turn(log.sampled, 1.0 if number % 2 else -1.0),)
        return TrainSample(number, 1, "frozenlake", (log,), turns, value)


def test_two_steps_of_training():
    async def main():
        store = MemoryStore()
        runtime = InlineRuntime()
        controller = Controller(runtime)
        runtime.listen(controller)
        lake = TaskSettings(environment="rollart.tasks.frozenlake:FrozenLake")
        host = {"task": "frozenlake", "settings": lake, "slots": 4}
        function = "rollart.backends.rewards.functions:episode_return"
        for name, role, factory, settings in (
            (
                "engine",
                Role.ENGINE,
                "rollart.backends.engines.reference:ReferenceEngine",
                {"pool": PoolSettings(slots=4)},
            ),
            ("trainer", Role.TRAINER, "rollart.backends.trainers.reference:ReferenceTrainer", {}),
            ("environment", Role.ENVIRONMENT, "rollart.backends.environments.host:EnvironmentHost", host),
            ("reward", Role.REWARD, "rollart.backends.rewards.host:RewardHost", {"function": function}),
        ):
            shared = {"model": MODEL, "store": store} if role in (Role.ENGINE, Role.TRAINER) else {}
            runtime.spawn(name, role, factory, {**shared, **settings})
        try:
            prompts = SeedPrompts("frozenlake", 0, 100)
            requests = iter(range(1, 10_000))
            await controller.sync(Version(0, 0))
            for step in (1, 2):
                numbers = range(step * 10, step * 10 + 4)
                samples = await asyncio.gather(
                    *[controller.episode(number, prompts.next(), requests) for number in numbers]
                )
                for sample in samples:
                    (run,) = sample.sequences[0].runs()
                    assert run.version == Version(0, step - 1)
                    assert run.length == sample.sequences[0].sampled > 0
                version = Version(0, step)
                done = await controller.ask("trainer", Train(step, version, tuple(samples)), Trained, claim=step)
                # One version behind nothing: engine and trainer have the same weights and must agree.
                assert done.metrics["mismatch"] <= 1e-4
                assert done.metrics["tokens"] == sum(sample.sequences[0].sampled for sample in samples)
                await controller.sync(version)
            assert controller.deaths == []
            assert set(controller.members) == {"engine", "trainer", "environment", "reward"}
        finally:
            await runtime.close()

    asyncio.run(main())
