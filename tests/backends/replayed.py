"""Transcripts of the quickstart's math task, played by its scripts, as requests for its reward."""

import random

from rollart.config.tasks import EPISODE_RETURN
from rollart.tasks.arithmetic import Arithmetic, any_answer, hasty, with_calculator
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import EpisodeRecord, Scored, ScoreRequest
from rollart.types.trajectory import Prompt
from rollart.types.transcript import Transcript, TranscriptTurn, pack

MATH = EPISODE_RETURN
"""The reward of the quickstart's math task."""
TEXT = f"{__name__}:careful"
"""One that reads texts, and gives parts."""


def careful(t: Transcript) -> dict[str, float]:
    return {"right": float(t.final_observation == "right"), "brief": 1.0 / (1 + sum(len(s.action) for s in t.turns))}


def episodes(number: int) -> list[EpisodeRecord]:
    """Episodes of good and bad players, the same every time."""
    players = [hasty, with_calculator, any_answer]
    return [_episode(seed, players[seed % len(players)]) for seed in range(number)]


def _episode(seed, player):
    prompt = Prompt(id=PromptId(str(seed)), task="math", seed=seed)
    environment, chance = Arithmetic(), random.Random(seed)
    seen, step, turns = [], environment.reset(prompt), []
    while not step.done and len(turns) < 5:
        seen.append(step.observation)
        action = player(seen, chance)
        step = environment.step(action)
        turns.append(TranscriptTurn(seen[-1], action, step.reward))
    t = Transcript(
        task="math",
        trajectory=TrajectoryId(seed),
        prompt_id=prompt.id,
        seed=seed,
        member=0,
        turns=tuple(turns),
        final_observation=step.observation,
    )
    return EpisodeRecord(t.trajectory, seed, tuple(turn.reward for turn in turns), transcript=pack(t))


def scores(driver, records, reward: str) -> list[Scored]:
    """What a worker answers to all of them, in order; never more requests at once than it takes."""
    waiting = [ScoreRequest(f"{each.trajectory}/{reward}", "math", reward, (each,), 60.0) for each in records]
    order, room, open_, found = [each.key for each in waiting], driver.worker.info().slots, 0, {}
    waiting.reverse()
    while waiting or open_:
        new = [waiting.pop() for _ in range(min(room - open_, len(waiting)))]
        driver.send(*new)
        open_ += len(new)
        answers = driver.answers()
        open_ -= len(answers)
        for answer in answers:
            assert isinstance(answer, Scored), answer
            assert answer.key not in found
            found[answer.key] = answer
    return [found[key] for key in order]
