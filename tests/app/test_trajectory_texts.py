"""Trajectories as text: what is in it, how much of it there is, and that nothing depends on it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollart.app.redaction import REDACTED, Redactor
from rollart.app.trajectory_texts import (
    FILES,
    LONGEST_TEXT,
    MOST_PARTS,
    MOST_TOKENS,
    PER_KIND,
    TrajectoryTexts,
    describe,
    sample,
)
from rollart.backends.environments.codec import END_OF_TURN, ByteCodec
from rollart.observe.page.samples import read_samples
from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.tokens import Generated, Segment, VersionRun
from rollart.types.trajectory import Outcome, Prompt, Purpose, Trajectory
from rollart.types.versions import Version

CODEC = ByteCodec()


def trajectory(
    *turns: tuple[str, str],
    id: int = 1,
    step: int = 3,
    outcome: Outcome = Outcome.COMPLETED,
    purpose: Purpose = Purpose.TRAIN,
) -> Trajectory:
    """Observations with the answers to them; an answer is sampled with the weights of its turn."""
    prompt = Prompt(PromptId("17"), "maze", 17)
    made = Trajectory(
        id=TrajectoryId(id), group=GroupId(1), member=0, attempt=0, task="maze", purpose=purpose, prompt=prompt
    )
    for number, (observation, answer) in enumerate(turns):
        made.sequence.append_context(Segment.of(CODEC.render(observation, first=not number)))
        if answer:
            tokens = [*answer.encode(), END_OF_TURN]
            half = len(tokens) // 2
            runs = (VersionRun(Version(0, step), half), VersionRun(Version(0, step + number), len(tokens) - half))
            logprobs = np.linspace(-1, -2, len(tokens), dtype="<f4").tobytes()
            made.sequence.append_sampled(Generated(Segment.of(tokens), logprobs, runs))
            made.turns += 1
            made.turn_tokens.append(len(tokens))
    made.first_version = Version(0, step)
    made.outcome = outcome
    return made


def test_a_trajectory_turn_by_turn() -> None:
    played = trajectory(("You are at A.", "go left"), ("A wall.", "go right"), ("The goal.", ""))
    played.turn_rewards, played.reward = [0.0, 0.5], 0.5
    assert describe(played, "", CODEC) == (
        "=== trajectory 1, maze, train, prompt 17: completed, reward 0.5\n"
        "--- observation\nYou are at A.\n"
        "--- answer 1, with v0.3\ngo left\n"
        "--- observation\nA wall.\n"
        "--- answer 2, with v0.3 and v0.4, earned 0.5\ngo right\n"
        "--- observation\nThe goal.\n"
    )


def test_what_was_shown_after_the_last_action_is_told_too() -> None:
    """It is not part of the sequence, so `describe` and `sample` get it from the trajectory itself."""
    played = trajectory(("You are at A.", "go left"))
    played.last_observation = Segment.of(CODEC.render("The goal.", first=False))
    assert describe(played, "", CODEC).endswith("go left\n--- observation\nThe goal.\n")
    sampled = sample(played, "train", 3, "", CODEC)
    assert [part.text for part in sampled.parts] == ["You are at A.", "", "The goal."]


def test_a_new_context_and_a_failure() -> None:
    played = trajectory(("One.", "a"), outcome=Outcome.ENV_FAILED)
    played.open_sequence()
    played.sequence.append_context(Segment.of(CODEC.render("Two.", first=True)))
    text = describe(played, "the host is gone", CODEC)
    assert text.startswith("=== trajectory 1, maze, train, prompt 17: env_failed, no reward (the host is gone)\n")
    assert "a\n--- a new context\n--- observation\nTwo.\n" in text


def test_two_answers_in_a_row_are_two() -> None:
    played = trajectory(("One.", "a"))
    played.sequence.append_sampled(Generated(Segment.of([98]), b"\0" * 4, (VersionRun(Version(0, 5), 1),)))
    played.turn_tokens.append(1)
    assert "--- answer 1, with v0.3\na\n--- answer 2, with v0.5\nb\n" in describe(played, "", CODEC)


def test_long_and_unprintable_texts_are_tamed() -> None:
    text = describe(trajectory(("x" * (LONGEST_TEXT + 1234), "\x1b[2J\n")), "", CODEC)
    assert "x … (1,234 characters more)\n" in text
    assert "x" * (LONGEST_TEXT + 1) not in text
    assert "\x1b" not in text
    assert "\\x1b[2J\n" in text


def test_every_token_keeps_its_version_and_log_probability() -> None:
    played = trajectory(("You are at A.", "go"), ("A wall.", "é"))
    played.turn_rewards, played.reward = [0.0, 0.5], 0.5
    sampled = sample(played, "train", 3, "", CODEC)
    assert sampled.versions == ("v0.3", "v0.4")
    assert [part.text for part in sampled.parts if not part.tokens] == ["You are at A.", "A wall."]
    first, second = (part for part in sampled.parts if part.tokens)
    assert [(token.text, token.id, token.logprob, token.version) for token in first.tokens] == [
        ("g", ord("g"), -1.0, 0),
        ("o", ord("o"), -1.5, 0),
        ("", END_OF_TURN, -2.0, 0),
    ]
    assert [(token.text, token.version) for token in second.tokens] == [("", 0), ("é", 1), ("", 1)]
    assert (first.turn, first.earned, second.turn, second.earned) == (1, 0.0, 2, 0.5)


def test_long_trajectories_are_cut_in_both_directions() -> None:
    long = sample(trajectory(("o", "x" * (MOST_TOKENS + 50))), "train", 3, "", CODEC)
    assert len(long.parts[1].tokens) == MOST_TOKENS
    many = sample(trajectory(*[("o", "a")] * MOST_PARTS), "train", 3, "", CODEC)
    assert (len(many.parts), many.left_out) == (MOST_PARTS, MOST_PARTS)


def written(folder: Path) -> dict[str, int]:
    texts = {path.name: path.read_text().count("=== trajectory") for path in sorted(folder.glob("*.txt"))}
    lines = {path.stem + ".txt": len(path.read_bytes().splitlines()) for path in folder.glob("*.jsonl")}
    assert lines == texts
    return texts


def test_what_is_written_is_what_the_page_reads(tmp_path: Path) -> None:
    texts = TrajectoryTexts(tmp_path / "t", CODEC, 10, pytest.fail)
    texts.ended(trajectory(("o", "a"), outcome=Outcome.ENV_FAILED), "it hangs")
    (read,) = read_samples(tmp_path / "t")
    assert (read.kind, read.cause, read.outcome, read.reward) == ("failed", "it hangs", "env_failed", None)


def test_files_are_few_and_small(tmp_path: Path) -> None:
    steps = 100
    texts = TrajectoryTexts(tmp_path / "t", CODEC, steps, pytest.fail)
    for step in range(steps):
        for id in range(8):
            texts.ended(trajectory(("o", "a"), id=id, step=step), "")
    assert written(tmp_path / "t") == {f"step-{step:06}.txt": PER_KIND for step in range(0, steps, steps // FILES)}


def test_each_kind_has_its_share(tmp_path: Path) -> None:
    texts = TrajectoryTexts(tmp_path / "t", CODEC, 100, pytest.fail)
    for _ in range(9):
        texts.ended(trajectory(("o", "a"), step=5), "")
        texts.ended(trajectory(("o", "a"), step=7, purpose=Purpose.EVAL), "")
        texts.ended(trajectory(("o", "a"), step=10, outcome=Outcome.ENV_FAILED), "broken")
        texts.ended(trajectory(("o", "a"), step=10, outcome=Outcome.REDUNDANT), "too late")
        texts.ended(trajectory(("o", "a"), step=6), "")
    assert written(tmp_path / "t") == {
        "step-000005.txt": PER_KIND,
        "step-000007.txt": PER_KIND,
        "step-000010.txt": PER_KIND,
    }


def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("not a folder")
    messages: list[str] = []
    texts = TrajectoryTexts(tmp_path / "t", CODEC, 10, messages.append)
    for id in range(3):
        texts.ended(trajectory(("o", "a"), id=id), "")
    assert len(messages) == 1
    assert "cannot write trajectories" in messages[0]


def test_a_codec_that_raises_stops_these_texts_only(tmp_path: Path) -> None:
    class Words(ByteCodec):
        def text(self, tokens: Sequence[int]) -> str:
            raise KeyError(tokens[0])

    messages: list[str] = []
    texts = TrajectoryTexts(tmp_path / "t", Words(), 10, messages.append)
    texts.ended(trajectory(("o", "a")), "")
    texts.ended(trajectory(("o", "a"), id=2), "")
    assert len(messages) == 1
    assert "KeyError" in messages[0]


def test_causes_are_redacted(tmp_path: Path) -> None:
    texts = TrajectoryTexts(tmp_path / "t", CODEC, 10, print, Redactor(["key-[0-9]+"]))
    texts.ended(trajectory(("o", "a"), outcome=Outcome.ENV_FAILED), "no answer for key-17")
    kept = "".join(path.read_text() for path in (tmp_path / "t").iterdir())
    assert kept.count(f"no answer for {REDACTED}") == 2
    assert "key-17" not in kept
