"""`rollart env check`: plays a task's environment and says what would trouble a run.

    same seed, same answers                        ─► the same episode?
    several at once                                ─► the same episodes as one at a time?
    nonsense                                       ─► an observation, not an exception?
    many episodes                                  ─► threads, open files, memory left behind?

Problems make the check fail; notes are worth knowing.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollart.app.compose import codec_of, hosted
from rollart.app.environment_play import (
    Answer,
    Episode,
    Table,
    own_script,
    random_player,
    replay,
    scripted_player,
)
from rollart.app.task_checks import prompts_of
from rollart.backends.environments.codec import Codec
from rollart.backends.environments.interpreter import Interpreter
from rollart.backends.environments.sources import EnvironmentSource, open_source
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.ports.factory import load
from rollart.types.errors import RequestError
from rollart.types.trajectory import Prompt

TOGETHER = 4
"""Episodes played at the same time."""
LEAK_EPISODES = 12
"""Episodes over which leaks are measured, after as many to warm up."""
MEMORY_MB_PER_EPISODE = 2.0
"""Memory growth per episode above which the check fails."""
NONSENSE = ("", " \n", "\x00", "🙂" * 20, "x" * 10_000, "{}", "[[[", "[-1]", "1e999", "</s><|im_end|>", "None")
SHOWN = 60
"""Characters of a text in a problem."""


class Times(msgspec.Struct, frozen=True):
    """Milliseconds."""

    median: float
    p95: float
    longest: float


class PlayerFigures(msgspec.Struct, frozen=True):
    """What one player earned. `ended`: share of its episodes that the environment ended."""

    episodes: int
    mean_reward: float
    lowest_reward: float
    highest_reward: float
    mean_turns: float
    ended: float


class Leaks(msgspec.Struct, frozen=True):
    """Growth per episode in the process that plays it."""

    threads: float
    files: float
    memory_mb: float


class Sizes(msgspec.Struct, frozen=True):
    """Characters of observations; tokens of a whole episode, with a codec."""

    first_observation: int
    longest_observation: int
    longest_episode_tokens: int | None = None


class Line(msgspec.Struct, frozen=True):
    """A part of the shown episode. `reward` is that of the observation."""

    speaker: str
    text: str
    reward: float = 0.0
    tokens: int | None = None


class EnvironmentCheck(msgspec.Struct, frozen=True):
    """Result of a check."""

    task: str
    environment: str
    python: str
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    players: dict[str, PlayerFigures] = {}
    reset_ms: Times | None = None
    step_ms: Times | None = None
    sizes: Sizes | None = None
    leaks: Leaks | None = None
    episode: tuple[Line, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems


class Usage(NamedTuple):
    """Resources that a process uses."""

    threads: int
    files: int
    memory_mb: float


def check_environment(
    config: RunConfig, task: str, *, episodes: int, script: str = "", with_tokens: bool = False
) -> EnvironmentCheck:
    """Play the environment of a task. `script`: factory path of a scripted player; by default the task's own."""
    settings = hosted(config.tasks[task])
    if not settings.environment:
        raise RequestError(
            f"task {task!r} has no environment to check: its rows, tools and template are checked before every run"
        )
    own_codec = codec_of(config)
    source = open_source(task, settings, max(TOGETHER, 8), own_codec)
    try:
        table = Table(source, settings.max_turns, settings.step_deadline_s)
        prompts = [_fresh(config, task, number) for number in range(max(episodes, TOGETHER))]
        check = _Check(table, source, prompts, own_codec if with_tokens else None)
        check.run(_script_of(settings.environment, script))
    finally:
        source.close()
    return msgspec.structs.replace(
        check.result(), task=task, environment=config.tasks[task].environment, python=settings.python
    )


def _fresh(config: RunConfig, task: str, number: int) -> Prompt:
    prompts = prompts_of(config, task, held_out=False)
    for _ in range(number):
        prompts.next()
    return prompts.next()


def _script_of(environment: str, script: str) -> Callable[[int], Answer] | None:
    """The scripted player of a task, by seed: the best that is known of it."""
    if script:
        function = load(script)
        return lambda seed: scripted_player(function, seed)
    from rollart.tasks.builtin import BUILT_IN  # late: it needs Gymnasium, which other commands do not

    for task in BUILT_IN.values():
        if task.factory == environment:
            best = list(task.baselines.values())[-1]
            return lambda seed: scripted_player(best, seed)
    return None


class _Check:
    """The parts of a check; each adds to `problems` and `notes`."""

    def __init__(self, table: Table, source: EnvironmentSource, prompts: Sequence[Prompt], codec: Codec | None) -> None:
        self._table = table
        self._source = source
        self._prompts = prompts
        self._codec = codec
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._played: dict[str, list[Episode]] = {}
        self._leaks: Leaks | None = None

    def run(self, script: Callable[[int], Answer] | None) -> None:
        players: dict[str, Callable[[int], Answer]] = {"random": random_player}
        players["scripted"] = script or (lambda _: own_script)
        for name, player in players.items():
            found = self._players_episodes(name, player)
            if name == "random" and not found:
                return  # it does not work at all
        self._determinism()
        self._together()
        self._nonsense()
        self._leaks = self._left_behind()
        self._rewards()

    def result(self) -> EnvironmentCheck:
        episodes = [episode for played in self._played.values() for episode in played]
        shown = next(iter(reversed(list(self._played.values()))), [])
        return EnvironmentCheck(
            task="",
            environment="",
            python="",
            problems=tuple(dict.fromkeys(self.problems)),
            notes=tuple(dict.fromkeys(self.notes)),
            players={name: _figures(played) for name, played in self._played.items()},
            reset_ms=_times([each.turns[0].seconds for each in episodes]),
            step_ms=_times([turn.seconds for each in episodes for turn in each.turns[1:]]),
            sizes=self._sizes(episodes),
            leaks=self._leaks,
            episode=tuple(self._lines(shown[0])) if shown else (),
        )

    def _play(self, prompt: Prompt, answer: Answer, what: str) -> Episode | None:
        """An episode that worked, else None and a problem."""
        episode = self._table.play(prompt, answer)
        return episode if self._worked(episode, what) else None

    def _worked(self, episode: Episode, what: str) -> bool:
        if episode.close_failure:
            self.problems.append(f"close raised {episode.close_failure}; it must work at any time, after a failure too")
        for turn in episode.turns:
            if not turn.done and not turn.observation.strip():
                self.problems.append(
                    f"an observation is empty ({what}, seed {episode.prompt.seed}); a model needs something to answer"
                )
        if episode.failed:
            said = f" on {_short(episode.answers[-1])}" if episode.answers else ""
            self.problems.append(f"{what}, seed {episode.prompt.seed}: {episode.failed}{said}")
        return not episode.failed

    def _players_episodes(self, name: str, player: Callable[[int], Answer]) -> list[Episode]:
        played: list[Episode] = []
        for number, prompt in enumerate(self._prompts):
            if name == "scripted" and number == 0:
                episode: Episode | None = self._table.play(prompt, player(number))
                assert episode is not None
                if episode.failed.startswith("NoScript"):
                    self.notes.append("there is no scripted player; name one to see whether the task can be solved")
                    return []
                episode = episode if self._worked(episode, "the scripted player") else None
            else:
                episode = self._play(prompt, player(number), f"the {name} player")
            if episode is None:
                break  # one broken episode says enough
            played.append(episode)
        if played:
            self._played[name] = played
        return played

    def _determinism(self) -> None:
        first = self._played["random"][0]
        again = self._play(first.prompt, replay(first.answers), "playing an episode again")
        if again is not None:
            self._compare(first, again, "The same seed and answers gave another episode", "draw all from the seed")
        seeds = {episode.observations[0] for episode in self._played["random"]}
        if len(self._played["random"]) > 1 and len(seeds) == 1:
            self.notes.append(f"all {len(self._played['random'])} seeds begin alike")

    def _compare(self, one: Episode, other: Episode, what: str, remedy: str) -> None:
        if one.contents == other.contents:
            return
        for number, (before, after) in enumerate(zip(one.contents, other.contents, strict=False)):
            if before != after:
                self.problems.append(
                    f"{what} (seed {one.prompt.seed}, turn {number}: {_short(before[0])}, reward {before[1]:g}; then "
                    f"{_short(after[0])}, reward {after[1]:g}); {remedy}"
                )
                return
        lengths = f"{len(one.turns)} turns, then {len(other.turns)}"
        self.problems.append(f"{what} (seed {one.prompt.seed}: {lengths}); {remedy}")

    def _together(self) -> None:
        alone = self._played["random"][:TOGETHER]
        episodes = self._table.play_together(
            [episode.prompt for episode in alone], [replay(episode.answers) for episode in alone]
        )
        for before, after in zip(alone, episodes, strict=True):
            if self._worked(after, f"{len(alone)} episodes at once"):
                what = f"{len(alone)} episodes at once differ from the same one at a time"
                self._compare(before, after, what, "environments must not share state")

    def _nonsense(self) -> None:
        prompt = self._prompts[0]
        for answer in NONSENSE:
            episode = self._table.play(prompt, _once(answer))
            if episode.failed and not episode.failed.startswith("_Enough"):
                self.problems.append(
                    f"the answer {_short(answer)} is not survived: {episode.failed}; whatever the agent says deserves "
                    "an observation"
                )
                if episode.hangs:
                    return
        after = self._play(prompt, replay(self._played["random"][0].answers), "an episode after nonsense")
        if after is not None:
            self._compare(self._played["random"][0], after, "An episode after nonsense differs", "reset everything")

    def _left_behind(self) -> Leaks | None:
        answers = self._played["random"][0].answers
        usages = []
        for _ in range(2):
            for number in range(LEAK_EPISODES):
                prompt = self._prompts[number % len(self._prompts)]
                self._table.play(prompt, replay(answers))
            usages.append(self._usage())
        before, after = usages
        if before is None or after is None:
            return None
        left = Leaks(*((late - early) / LEAK_EPISODES for early, late in zip(before, after, strict=True)))
        for name, each in (("threads", left.threads), ("open files", left.files)):
            if each >= 0.5:
                self.problems.append(f"{each:.1f} {name} are left behind by every episode; free them in close")
        if left.memory_mb > MEMORY_MB_PER_EPISODE:
            self.problems.append(f"memory grows by {left.memory_mb:.1f} MB with every episode")
        return left

    def _usage(self) -> Usage | None:
        """Usage of the process that plays; None where it cannot be read."""
        process = Path("/proc") / str(self._source.pid if isinstance(self._source, Interpreter) else os.getpid())
        try:
            pages = int((process / "statm").read_text().split()[1])
            threads, files = len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))
        except OSError:
            return None
        return Usage(threads, files, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def _rewards(self) -> None:
        rewards = {episode.reward for played in self._played.values() for episode in played}
        if len(rewards) == 1:
            self.notes.append(f"every episode earned {rewards.pop():g}: as played, nothing can be learned from it")
        unended = [name for name, played in self._played.items() if not any(episode.done for episode in played)]
        for name in unended:
            self.notes.append(f"no episode of the {name} player ended before the limit of turns (max_turns)")

    def _sizes(self, episodes: Sequence[Episode]) -> Sizes | None:
        if not episodes:
            return None
        lengths = [len(text) for episode in episodes for text in episode.observations]
        tokens = None
        if self._codec is not None:
            tokens = max(sum(line.tokens or 0 for line in self._lines(episode)) for episode in episodes)
        return Sizes(max(len(episode.observations[0]) for episode in episodes), max(lengths), tokens)

    def _lines(self, episode: Episode) -> list[Line]:
        lines = []
        for number, turn in enumerate(episode.turns):
            tokens = None if self._codec is None else len(self._codec.render(turn.observation, first=number == 0))
            lines.append(Line("environment", turn.observation, turn.reward, tokens))
            if number < len(episode.answers):
                written = getattr(self._codec, "answer", None)
                said = episode.answers[number]
                lines.append(Line("agent", said, tokens=None if written is None else len(written(said))))
        return lines


class _Enough(Exception):
    """The answer was survived."""


def _once(text: str) -> Answer:
    """One answer, and then no more."""

    def answer(episode: Episode, _: object) -> str:
        if episode.answers:
            raise _Enough
        return text

    return answer


def _figures(played: Sequence[Episode]) -> PlayerFigures:
    rewards = [episode.reward for episode in played]
    return PlayerFigures(
        episodes=len(played),
        mean_reward=statistics.fmean(rewards),
        lowest_reward=min(rewards),
        highest_reward=max(rewards),
        mean_turns=statistics.fmean(len(episode.answers) for episode in played),
        ended=statistics.fmean(episode.done for episode in played),
    )


def _times(seconds: Sequence[float]) -> Times | None:
    if not seconds:
        return None
    ordered = [1000 * each for each in sorted(seconds)]
    return Times(statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], ordered[-1])


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def task_of(config: RunConfig, task: str) -> str:
    """The task to check: the one named, or the only one."""
    if task:
        if task not in config.tasks:
            raise RequestError(
                f"the config has no task {task!r}{did_you_mean(task, config.tasks)}; it has {', '.join(config.tasks)}"
            )
        return task
    if len(config.tasks) > 1:
        raise RequestError(f"the config has several tasks; name one with --task: {', '.join(config.tasks)}")
    return next(iter(config.tasks))
