"""Episodes for TRL's side of `rollart bench trl`, as a skilled user would write its `rollout_func`.

    threads: reset or step, render ──► ready ──► one batched `generate` for all that are ready ──► threads …

Invariants: an episode is in a thread, in the queue or in the batch being generated, and leaves when it is over. No
particular environment is waited for: a slow one delays only its own episode, and the batch only at the end.
"""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rollart.backends.environments.codec import Codec
from rollart.backends.environments.inject import Injected, hangs
from rollart.config.injection import Injection
from rollart.ports.environment import TextStep
from rollart.tasks.frozenlake import FrozenLake
from rollart.types.chat import readable
from rollart.types.ids import TrajectoryId
from rollart.types.messages import Reset
from rollart.types.trajectory import Prompt

GATHER_S = 0.003
"""How long the loop waits for one more environment before it generates."""

Generate = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]]
"""From contexts to answers, in tokens; an answer includes its stop token, if there was one."""


class Game:
    """FrozenLake with the injected faults: plays one episode after the other, each as the same member of its group."""

    def __init__(self, member: int, injection: Injection) -> None:
        self._member = member
        self._injection = injection
        self.turns = 0
        self.reward = 0.0
        self.done = False
        self.hung = False

    def begin(self, prompt: Prompt) -> str:
        self._seed = prompt.seed
        self._lake = Injected(FrozenLake(), self._injection, Reset(TrajectoryId(0), 0, prompt, self._member))
        self.turns, self.reward, self.hung = 0, 0.0, False
        return self._seen(self._lake.reset(prompt))

    def play(self, answer: str) -> str:
        self.turns += 1
        return self._seen(self._lake.step(answer))

    def _seen(self, step: object) -> str:
        assert isinstance(step, TextStep)  # FrozenLake is not async
        self.hung = self.hung or hangs(self._injection, self._seed, self._member, self.turns)
        self.reward += step.reward
        self.done = step.done
        return readable(step.observation)


class Episode:
    """A game in tokens, as the agent sees it in rollart: rendered once, turn by turn."""

    def __init__(self, game: Game, prompt: Prompt, codec: Codec, max_turns: int) -> None:
        self.game = game
        self._prompt = prompt
        self._codec = codec
        self._max_turns = max_turns
        self.prompt_ids: list[int] = []
        self.completion_ids: list[int] = []
        self.mask: list[int] = []
        """1 for sampled tokens."""
        self._answer: Sequence[int] | None = None

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def over(self) -> bool:
        return self.game.done or self.game.turns == self._max_turns

    def answered(self, answer: Sequence[int]) -> None:
        self._answer = answer
        self._append(answer, sampled=1)

    def advance(self) -> None:
        """The environment's work, in a thread: reset, or play the last answer."""
        if self._answer is None:
            self.prompt_ids = self._codec.render(self.game.begin(self._prompt), first=True)
            return
        seen = self.game.play(self._codec.text(self._answer))
        if not self.over:
            stop = self._codec.stop_tokens
            end = [] if self._answer[-1] in stop else [stop[0]]
            self._append([*end, *self._codec.render(seen, first=False)], sampled=0)

    def _append(self, tokens: Sequence[int], sampled: int) -> None:
        self.completion_ids += tokens
        self.mask += [sampled] * len(tokens)


def play(episodes: Sequence[Episode], generate: Generate, threads: ThreadPoolExecutor) -> None:
    """Play all episodes to the end."""
    ready: queue.SimpleQueue[tuple[Episode, Future[None]]] = queue.SimpleQueue()

    def advance(episode: Episode) -> None:
        threads.submit(episode.advance).add_done_callback(lambda done: ready.put((episode, done)))

    for episode in episodes:
        advance(episode)
    away = len(episodes)
    while away:
        there = _gather(ready, away)
        away -= len(there)
        going_on = [episode for episode in there if not episode.over]
        if going_on:
            answers = generate([episode.context for episode in going_on])
            for episode, answer in zip(going_on, answers, strict=True):
                episode.answered(answer)
                advance(episode)
            away += len(going_on)


def _gather(ready: "queue.SimpleQueue[tuple[Episode, Future[None]]]", most: int) -> list[Episode]:
    """All ready episodes, at least one. Re-raises errors of environments."""
    there = [ready.get()]
    try:
        while len(there) < most:
            there.append(ready.get(timeout=GATHER_S))
    except queue.Empty:
        pass
    for _, done in there:
        done.result()
    return [episode for episode, _ in there]
