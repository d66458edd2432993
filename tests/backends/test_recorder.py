"""Transcripts as an environment worker makes them: what is in them, and that they come when the episode ends."""

from parts import Driver

from rollart.backends.environments.codec import END_OF_TURN, ByteCodec
from rollart.backends.environments.host import EnvironmentHost
from rollart.ports.environment import TextStep
from rollart.types.messages import EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt
from rollart.types.transcript import Transcript, TranscriptTurn, Truncation, unpack

CODEC = ByteCodec()


class Corridor:
    """Echoes actions; some words have side effects."""

    def reset(self, prompt):
        return TextStep(f"door {prompt.seed}", state="start")

    def step(self, action):
        match action:
            case "out":
                return TextStep("free", 1.0, done=True, artifact=b"key")
            case "tired":
                return TextStep("night", done=True, truncated=True)
            case "fresh":
                return TextStep("a new day", 0.25, fresh_context=True)
            case "break":
                return TextStep(None)
        return TextStep(f"heard {action}", 0.5)

    def close(self):
        pass


def host(**settings):
    flat = {"task": "corridor", "environment": f"{__name__}:Corridor", "slots": 2, "transcripts": True, **settings}
    return Driver(EnvironmentHost, flat)


def play(driver, *actions, episode=1):
    """The last answer, and how many tokens the controller has counted by then."""
    prompt = Prompt("p9", "corridor", 4, {"answer": "out"})
    (answer,) = driver.call(Reset(episode, 0, prompt, 3))
    length = answer.observation.length
    for turn, action in enumerate(actions, 1):
        assert not answer.transcript, "not before the end"
        tokens = [*action.encode(), END_OF_TURN]
        (answer,) = driver.call(Step(episode, turn, Segment.of(tokens)))
        if isinstance(answer, Observed):
            observed = answer.observation.length
            length = observed if answer.new_sequence else length + len(tokens) + observed
    return answer, length


def test_a_whole_episode():
    driver = host()
    answer, _ = play(driver, "hello", "fresh", "out")
    assert unpack(answer.transcript) == Transcript(
        task="corridor",
        trajectory=1,
        prompt_id="p9",
        seed=4,
        member=3,
        prompt={"answer": "out"},
        turns=(
            TranscriptTurn("door 4", "hello", 0.5, "start"),
            TranscriptTurn("heard hello", "fresh", 0.25),
            TranscriptTurn("a new day", "out", 1.0, fresh_context=True),
        ),
        final_observation="free",
        artifact=b"key",
    )
    again, _ = play(driver, "out", episode=2)
    assert [turn.action for turn in unpack(again.transcript).turns] == ["out"], "nothing of the episode before"
    driver.worker.close()


def test_limits_of_the_agent():
    tired, _ = play(host(), "tired")
    assert unpack(tired.transcript).truncated is Truncation.ENVIRONMENT
    third, _ = play(host(max_turns=3), "a", "b", "c")
    assert unpack(third.transcript).truncated is Truncation.TURNS
    last, _ = play(host(max_turns=1), "out")
    assert unpack(last.transcript).truncated is None, "the environment ended it itself"


def test_the_context_is_counted_as_the_controller_counts_it():
    """At the length that the controller has seen the transcript comes; one token more and the episode goes on."""
    fresh = ("hi", "fresh", "hello", "b")
    _, length = play(host(), *fresh)
    assert length > play(host(), *fresh[:1])[1], "the context after the new beginning is the longest"
    full, _ = play(host(max_context=length, max_turn_tokens=2), *fresh)
    assert unpack(full.transcript).truncated is Truncation.CONTEXT
    _, length = play(host(), "hello", "b")
    at_limit, _ = play(host(max_context=length, max_turn_tokens=2), "hello", "b")
    assert unpack(at_limit.transcript).truncated is Truncation.CONTEXT
    below, _ = play(host(max_context=length + 1, max_turn_tokens=2), "hello", "b")
    assert not below.transcript


def test_a_prompt_that_fills_the_context_ends_the_episode_before_the_first_turn():
    first, length = play(host())
    assert not first.transcript
    full, _ = play(host(max_context=length, max_turn_tokens=2))
    made = unpack(full.transcript)
    assert (made.turns, made.final_observation, made.truncated) == ((), "door 4", Truncation.CONTEXT)


def test_a_broken_environment_has_none():
    answer, _ = play(host(), "break")
    assert isinstance(answer, EnvironmentFailed)


def test_none_is_made_if_none_is_wanted():
    answer, _ = play(host(transcripts=False), "out")
    assert answer.transcript == b""
