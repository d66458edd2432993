"""The token log as a specification: what was appended is what engine and trainer see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.types.tokens import (
    EMPTY,
    LOGPROB,
    NOTHING,
    Generated,
    Segment,
    TokenSequence,
    VersionRun,
    concatenate,
    merge_runs,
    prefix_digest,
)
from rollart.types.versions import Version

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)


def sampled(ids: list[int], *runs: tuple[Version, int]) -> Generated:
    """Tokens with the log-probability -id / 8, exact in 32 bits."""
    logprobs = np.asarray([-id / 8 for id in ids], dtype=LOGPROB).tobytes()
    return Generated(Segment.of(ids), logprobs, tuple(VersionRun(*run) for run in runs or [(V0, len(ids))]))


def conversation() -> TokenSequence:
    """Prompt 1 2 3, answer 4 5 over an update, observation 6, answer 7."""
    sequence = TokenSequence()
    sequence.append_context(Segment.of([1, 2, 3]))
    sequence.append_sampled(sampled([4, 5], (V0, 1), (V1, 1)))
    sequence.append_context(Segment.of([6]))
    sequence.append_sampled(sampled([7], (V1, 1)))
    return sequence


# --- segments -------------------------------------------------------------------------------------------------------


def test_a_segment_is_its_tokens_as_little_endian_32_bits() -> None:
    segment = Segment.of([1, 256, -1])
    assert segment.length == 3
    assert segment.payload == bytes.fromhex("01000000 00010000 ffffffff")
    assert segment.ids().tolist() == [1, 256, -1]
    assert Segment.of(np.asarray([1, 256, -1], dtype=np.int32)) == segment


def test_no_tokens_are_a_segment_too() -> None:
    assert Segment.of([]) == EMPTY == Segment(0, b"")
    assert EMPTY.ids().tolist() == []


def test_a_simulated_segment_has_a_length_and_no_tokens() -> None:
    assert Segment(5).length == 5
    with pytest.raises(ValueError, match="simulated"):
        Segment(5).ids()


def test_adjacent_segments_are_one() -> None:
    assert concatenate([Segment.of([1]), Segment.of([2, 3])]) == Segment.of([1, 2, 3])
    assert concatenate([]) == EMPTY
    assert concatenate([Segment(2), Segment(3)]) == Segment(5)
    assert concatenate([Segment.of([1]), Segment(3)]) == Segment(4), "half a payload is none"


# --- what an engine sampled -----------------------------------------------------------------------------------------


def test_runs_of_the_same_version_are_joined() -> None:
    first, second = (VersionRun(V0, 2), VersionRun(V1, 3)), (VersionRun(V1, 4), VersionRun(V2, 5))
    assert merge_runs(first, second) == (VersionRun(V0, 2), VersionRun(V1, 7), VersionRun(V2, 5))
    assert merge_runs(first, second[1:]) == (*first, VersionRun(V2, 5))
    assert merge_runs((), second) == second
    assert merge_runs(first, ()) == first


def test_what_was_sampled_in_two_parts_is_one_turn() -> None:
    whole = sampled([4, 5], (V0, 2)).then(sampled([6, 7], (V0, 1), (V1, 1)))
    assert whole == sampled([4, 5, 6, 7], (V0, 3), (V1, 1))


def test_nothing_before_or_after_changes_nothing() -> None:
    part = sampled([4])
    assert NOTHING.then(part) is part
    assert part.then(NOTHING) is part


def test_simulated_parts_have_no_log_probabilities() -> None:
    part = Generated(Segment(2), None, (VersionRun(V0, 2),))
    assert part.then(part) == Generated(Segment(4), None, (VersionRun(V0, 4),))
    assert part.then(sampled([1])).logprobs is None
    assert sampled([1]).then(part).logprobs is None


# --- sequences ------------------------------------------------------------------------------------------------------


def test_a_sequence_is_all_that_was_appended_in_order() -> None:
    sequence = conversation()
    assert sequence.length == 7
    assert sequence.sampled == 3
    assert sequence.whole() == Segment.of([1, 2, 3, 4, 5, 6, 7])


def test_the_mask_is_true_where_the_policy_acted() -> None:
    assert conversation().action_mask().tolist() == [False, False, False, True, True, False, True]


def test_log_probabilities_stand_at_their_tokens_and_are_0_elsewhere() -> None:
    assert conversation().logprobs().tolist() == [0, 0, 0, -0.5, -0.625, 0, -0.875]


def test_runs_cover_the_sampled_tokens() -> None:
    assert conversation().runs() == (VersionRun(V0, 1), VersionRun(V1, 2))


def test_a_turn_names_what_the_engine_holds_after_it() -> None:
    sequence = TokenSequence()
    sequence.append_context(Segment.of([1, 2, 3]))
    assert (sequence.turn_length, sequence.turn_digest) == (0, b""), "no engine holds anything before the first turn"
    assert sequence.since_turn() == Segment.of([1, 2, 3])
    sequence.append_sampled(sampled([4, 5]))
    assert sequence.turn_length == 5
    assert sequence.turn_digest == prefix_digest(Segment.of([1, 2, 3, 4, 5]).payload or b"")
    assert sequence.since_turn() == EMPTY
    sequence.append_context(Segment.of([6]))
    assert sequence.turn_length == 5, "an observation is new to the engine"
    assert sequence.turn_digest == prefix_digest(Segment.of([1, 2, 3, 4, 5]).payload or b"")
    assert sequence.since_turn() == Segment.of([6])
    sequence.append_context(Segment.of([7, 8]))
    assert sequence.since_turn() == Segment.of([6, 7, 8])


def test_digests_tell_prefixes_apart() -> None:
    assert len(prefix_digest(b"")) == 16
    assert prefix_digest(Segment.of([1, 2]).payload or b"") != prefix_digest(Segment.of([2, 1]).payload or b"")


def test_nothing_appended_is_nothing() -> None:
    sequence = TokenSequence()
    sequence.append_context(EMPTY)
    sequence.append_sampled(NOTHING)
    assert (sequence.length, sequence.sampled, sequence.turn_digest) == (0, 0, b"")
    assert sequence.whole() == sequence.since_turn() == EMPTY
    assert sequence.runs() == ()
    assert sequence.action_mask().tolist() == []


def test_a_simulated_sequence_counts_but_holds_nothing() -> None:
    sequence = TokenSequence()
    sequence.append_context(Segment(100))
    sequence.append_sampled(Generated(Segment(7), None, (VersionRun(V0, 7),)))
    assert (sequence.length, sequence.sampled, sequence.turn_length) == (107, 7, 107)
    assert sequence.whole() == Segment(107)
    assert sequence.action_mask().sum() == 7
    with pytest.raises(ValueError, match="simulated"):
        sequence.logprobs()


tokens = st.lists(st.integers(0, 1000), max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), tokens, st.integers(0, 2)), max_size=12))
def test_every_view_agrees_with_what_was_appended(parts: list[tuple[bool, list[int], int]]) -> None:
    sequence = TokenSequence()
    everything: list[int] = []
    acted: list[bool] = []
    versions: list[int] = []
    since_turn: list[int] = []
    step = 0
    for by_policy, ids, newer in parts:
        everything += ids
        acted += [by_policy] * len(ids)
        if by_policy:
            step += newer
            versions += [step] * len(ids)
            sequence.append_sampled(sampled(ids, *([(Version(0, step), len(ids))] if ids else [])))
        else:
            sequence.append_context(Segment.of(ids))
        since_turn = ([] if ids else since_turn) if by_policy else since_turn + ids
    assert sequence.whole().ids().tolist() == everything
    assert sequence.since_turn().ids().tolist() == since_turn
    assert sequence.action_mask().tolist() == acted
    assert sequence.logprobs().tolist() == [
        -id / 8 if mask else 0.0 for id, mask in zip(everything, acted, strict=True)
    ]
    assert [run.version.step for run in sequence.runs() for _ in range(run.length)] == versions
    assert all(a.version < b.version for a, b in zip(sequence.runs(), sequence.runs()[1:], strict=False))
    assert (sequence.length, sequence.sampled) == (len(everything), sum(acted))
    if sequence.sampled:
        held = Segment.of(everything[: sequence.turn_length]).payload or b""
        assert sequence.turn_digest == prefix_digest(held)
        assert sequence.turn_length == len(everything) - len(since_turn)
