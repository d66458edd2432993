"""The table of tasks: what baselines reach, and that train and held-out content are apart."""

import hashlib
import random

import pytest

from rollart.app.cold_start import TRANSCRIPTS
from rollart.tasks import game
from rollart.tasks.builtin import BUILT_IN, transcripts
from rollart.tasks.prompts import SeedPrompts
from rollart.tasks.scripts import mean_reward
from rollart.tasks.split import is_held_out
from rollart.tasks.tokenizer import AGENT, END, USER, build_tokenizer

EPISODES = 300
REACHED = {
    "frozenlake": {"any move": 0.02, "best blind path": 0.34, "around holes": 0.89, "shortest way": 1.0},
    "math": {"any answer": 0.0, "with the calculator": 1.0},
    "game": {"any number": 0.19, "within bounds": 0.71, "halving": 1.0},
    "shop": {"anything": 0.16, "first result": 0.30, "hasty": 0.71, "careful": 0.99, "thorough": 1.0},
    "sokoban": {"any move": 0.05, "open move": 0.05, "greedy": 0.32, "solver": 1.0},
    "repair": {"any candidate": 0.26, "one try": 0.46, "until it passes": 0.98},
    "python_math": {"any answer": 0.0, "in the head": 0.01, "careless": 0.60, "with Python": 1.0},
}
"""Held-out mean reward of the scripts, as the docs have it."""
LONGEST = {"shop": (45, 60), "sokoban": (85, 25), "repair": (260, 10)}
"""Tokens of the first observation, and of any other."""


def prompts(name, held_out, count=EPISODES):
    source = SeedPrompts(name, 0, count, held_out=held_out)
    return [source.next() for _ in range(count)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_baselines_reach_what_the_docs_say(name):
    task = BUILT_IN[name]
    environment = task.scripted()
    assert list(task.baselines) == list(REACHED[name])
    for baseline, script in task.baselines.items():
        rate = mean_reward(environment, prompts(name, True), script, max_turns=task.max_turns)
        assert rate == pytest.approx(REACHED[name][baseline], abs=0.07), baseline


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_teachers_leave_something_to_learn(name):
    played = transcripts(name, 400)
    assert 0.2 < sum(each.success for each in played) / len(played) < 0.85


def test_the_teacher_is_drawn_for_the_episode_and_not_for_what_is_seen():
    """So that all attempts at a prompt begin with both ways, and show which of them is better."""
    first = {}
    for each in transcripts("game", 3000):
        observation, answer = each.turns[0]
        first.setdefault(observation, []).append(answer == game.a_third_up([observation], random.Random()))
    assert all(0.2 < sum(each) / len(each) < 0.8 for each in first.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_train_and_held_out_episodes_begin_differently(name):
    """In the game the beginning is the range, which both have; the secret is what differs."""
    environment = BUILT_IN[name].scripted()
    sides = [
        {environment.reset(prompt).observation for prompt in prompts(name, held_out)} for held_out in (False, True)
    ]
    assert min(len(side) for side in sides) > 20
    if name != "game":
        assert not sides[0] & sides[1]


def test_games_are_apart_by_range_and_secret():
    environment = BUILT_IN["game"].build()
    for held_out in (False, True):
        for prompt in prompts("game", held_out, 50):
            environment.reset(prompt)
            assert is_held_out(f"{environment._low} {environment._high} {environment._secret}") == held_out


@pytest.mark.parametrize("name", BUILT_IN)
def test_transcripts_are_of_training_content_and_reproducible(name):
    first = transcripts(name, 20, seed=3)
    assert first == transcripts(name, 20, seed=3)
    assert first != transcripts(name, 20, seed=4)
    held_out = {BUILT_IN[name].scripted().reset(prompt).observation for prompt in prompts(name, True)}
    if name != "game":
        assert not held_out & {each.turns[0][0] for each in first}


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_answer_is_an_error(name):
    task, chance = BUILT_IN[name], random.Random(0)
    signs = [*"ACLDRU 0123456789+-*[]\n\N{REPLACEMENT CHARACTER}xé", "click[", "search[mug]", "buy", "try ", "take "]
    for prompt in prompts(name, True, 30):
        environment = task.scripted()
        step = environment.reset(prompt)
        for _ in range(task.max_turns):
            if step.done:
                break
            step = environment.step("".join(chance.choices(signs, k=chance.randrange(6))))
        environment.close()


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_small_tokenizer_is_short_and_loses_nothing(name):
    """That of the quickstart for its tasks, one of its own for every other task."""
    learned = list(TRANSCRIPTS) if name in TRANSCRIPTS else [name]
    tokenizer = build_tokenizer(text for task in learned for text in BUILT_IN[task].texts)
    assert tokenizer.to_str() == build_tokenizer(text for task in learned for text in BUILT_IN[task].texts).to_str()
    assert tokenizer.get_vocab_size() < (320 if name in TRANSCRIPTS else 1000)
    first, later = LONGEST.get(name, (55, 20))
    for transcript in transcripts(name, 20):
        for turn, (observation, answer) in enumerate(transcript.turns):
            for text in (observation, answer):
                assert tokenizer.decode(tokenizer.encode(text).ids) == text
            assert len(tokenizer.encode(observation).ids) <= (later if turn else first)
            assert len(tokenizer.encode(answer).ids) < BUILT_IN[name].max_turn_tokens


def test_the_tokenizer_of_the_quickstart_is_the_same_in_every_version():
    """More tasks must not change it: its models and their results depend on its numbers."""
    tokenizer = build_tokenizer(text for task in TRANSCRIPTS for text in BUILT_IN[task].texts)
    digest = hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest()
    assert (digest, tokenizer.get_vocab_size()) == ("b05d4347423049b623c216cbe880b644", 296)


def test_the_small_tokenizer_takes_any_text():
    tokenizer = build_tokenizer(["go"])
    for text in ("", "Grüße 你好", "\x00\t\r\n", f"a {USER}"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    markers = [tokenizer.token_to_id(marker) for marker in (USER, AGENT, END)]
    assert tokenizer.encode(f"{USER}{AGENT}{END}").ids == markers
