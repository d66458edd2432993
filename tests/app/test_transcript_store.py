"""The transcripts of a run folder: their number is bounded, and a crash costs no more than the last one."""

from pathlib import Path

import pytest

from rollart.app.transcript_store import FILES, TranscriptStore, read_transcripts
from rollart.types.errors import RequestError
from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.rewards import RewardRule, RewardSheet
from rollart.types.trajectory import Outcome, Prompt, Purpose, Trajectory
from rollart.types.transcript import Transcript, TranscriptTurn, pack

LIMIT = 16_000


def ended(number: int, text: str = "hello", reward: float | None = 1.0) -> Trajectory:
    prompt = Prompt(PromptId("p"), "maze", 1)
    made = Trajectory(
        id=TrajectoryId(number),
        group=GroupId(number // 4),
        member=number % 4,
        attempt=0,
        task="maze",
        purpose=Purpose.TRAIN,
        prompt=prompt,
    )
    made.outcome, made.reward = Outcome.COMPLETED, reward
    made.rewards = RewardSheet((RewardRule("own"),))
    if reward is not None:
        made.rewards.enter("own", reward)
    made.transcript = pack(
        Transcript(
            task="maze",
            trajectory=made.id,
            prompt_id=prompt.id,
            seed=1,
            member=made.member,
            turns=(TranscriptTurn("go", text),),
        )
    )
    return made


def quiet(line: str) -> None:
    raise AssertionError(line)


def store(folder: Path, limit: int = LIMIT) -> TranscriptStore:
    return TranscriptStore(folder / "transcripts", limit, quiet)


def numbers(folder: Path) -> list[int]:
    return [each.trajectory for each in read_transcripts(folder / "transcripts")]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "transcripts").glob("*"))


def noise(number: int, length: int = 300) -> str:
    """Text that does not compress."""
    return "".join(chr(0x4E00 + (number * 7919 + index * index * 104729) % 20_000) for index in range(length))


def test_a_transcript_is_kept_with_what_became_of_it(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.ended(ended(5, "north", 0.5))
    kept.ended(ended(6, reward=None))
    first, second = read_transcripts(tmp_path / "transcripts")
    assert (first.trajectory, first.group, first.outcome, first.reward) == (5, 1, Outcome.COMPLETED, 0.5)
    assert first.rewards == {"own": 0.5}
    assert first.transcript().final_text == "north"
    assert (second.reward, second.rewards) == (None, {})


def test_the_newest_are_kept_within_the_limit(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for number in range(100):
        kept.ended(ended(number, noise(number)))
        assert size(tmp_path) <= LIMIT
    found = numbers(tmp_path)
    assert found == list(range(found[0], 100))
    assert size(tmp_path) > LIMIT * (FILES - 2) // FILES, "no more is removed than is needed"


def test_one_that_is_larger_than_everything_is_left_out(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.ended(ended(1))
    kept.ended(ended(2, noise(2, 20_000)))
    kept.ended(ended(3))
    assert numbers(tmp_path) == [1, 3]


def test_a_resumed_run_goes_on_after_a_record_that_was_cut_off(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for number in range(3):
        kept.ended(ended(number))
    (path,) = (tmp_path / "transcripts").iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    again = store(tmp_path)
    again.ended(ended(3))
    assert numbers(tmp_path) == [0, 1, 3]
    limit = 40 * size(tmp_path)
    small = store(tmp_path, limit)
    for number in range(4, 400):
        small.ended(ended(number, noise(number)))
        assert size(tmp_path) <= limit


def test_nothing_is_written_without_a_limit_or_a_transcript(tmp_path: Path) -> None:
    store(tmp_path, 0).ended(ended(1))
    bare = ended(2)
    bare.transcript = b""
    store(tmp_path).ended(bare)
    assert not (tmp_path / "transcripts").exists()


def test_a_folder_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "transcripts").write_text("a file")
    said: list[str] = []
    kept = TranscriptStore(tmp_path / "transcripts", LIMIT, said.append)
    for number in range(3):
        kept.ended(ended(number))
    (line,) = said
    assert "cannot write transcripts" in line


def test_a_file_that_a_run_removes_meanwhile_is_left_out(tmp_path: Path) -> None:
    for number in (1, 2):
        store(tmp_path).ended(ended(number))
    reading = read_transcripts(tmp_path / "transcripts")
    assert next(reading).trajectory == 1
    (tmp_path / "transcripts" / "000002.bin").unlink()
    assert list(reading) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store(tmp_path).ended(ended(1))
    (path,) = (tmp_path / "transcripts").iterdir()
    path.write_bytes(b"\x03\0\0\0abc")
    with pytest.raises(RequestError, match=r"000001\.bin is damaged"):
        numbers(tmp_path)
