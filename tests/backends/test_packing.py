"""Samples become micro-batches: every action token once, prompts once, no padding, within the budget."""

import numpy as np
import pytest
from packed_parts import branching, conversation, samples
from parts import VOCABULARY

from rollart.backends.trainers.packing import Untrainable, items, micro_batches
from rollart.types.tokens import Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version


def whole(trajectory, *logs):
    """A trajectory in which every sequence is one turn."""
    return TrainSample(trajectory, 1, "t", logs, tuple(Turn(log.sampled, 1.0) for log in logs), 0.0)


@pytest.mark.parametrize("budget", [1, 20, 40, 64, 10_000])
@pytest.mark.parametrize("share", [False, True])
def test_every_action_token_is_in_one_micro_batch(budget, share):
    rows = items(samples(), VOCABULARY)
    batches = micro_batches(rows, budget, share=share)
    packed = [item for batch in batches for item in batch.items]
    assert sorted(item.trajectory for item in packed) == sorted(row.trajectory for row in rows)
    for batch in batches:
        assert batch.tokens <= budget or len(batch.items) == 1
    assert micro_batches(rows, budget, share=share) == batches


def test_a_prompt_is_there_once_and_nothing_behind_the_last_action():
    rows = items(samples(), VOCABULARY)
    (shared,) = micro_batches(rows, 10_000)
    (apart,) = micro_batches(rows, 10_000, share=False)
    assert apart.tokens - shared.tokens == 3 * 17 + 2 * 9
    lengths = [row.fed.size for row in rows]
    assert lengths[:3] == [17 + 5 + 3 + 4 - 1, 17 + 9 - 1, 17]  # the last action is predicted and not fed
    assert apart.tokens == sum(lengths)


def test_what_is_common_is_there_once():
    """For two groups: the instructions once, and per group the part that members share."""
    rows = items(branching(), VOCABULARY)
    (batch,) = micro_batches(rows, 10_000)
    (tree,) = batch.trees
    assert sorted(tree.common) == sorted([0, 10] + 2 * [33, 30, 24, 22, 17, 14])
    assert {row.fed.size for row in rows} == {33}
    fed = {bytes(row.fed[:length].tobytes()) for row in rows for length in range(1, 34)}
    assert batch.tokens == len(fed)  # every beginning once


def test_a_tree_is_cut_where_it_is_full():
    rows = items(branching(), VOCABULARY)
    for budget in (34, 50, 70, 120):
        batches = micro_batches(rows, budget)
        assert all(batch.tokens <= budget for batch in batches)
        assert all(tree.common[0] == 0 for batch in batches for tree in batch.trees)
        assert sum(len(batch.items) for batch in batches) == len(rows)
        assert sum(batch.tokens for batch in batches) < sum(row.fed.size for row in rows)


def test_few_common_tokens_are_not_looked_for():
    """Six of a prompt are not, nine with the first answer are."""
    rows = items(branching(instructions=2), VOCABULARY)
    (batch,) = micro_batches(rows, 10_000)
    assert sorted(len(tree.members) for tree in batch.trees) == [1, 1, 6, 6]


def test_masked_samples_and_tokens_that_nothing_predicts_are_left_out():
    log = TokenSequence()
    log.append_sampled(Generated(Segment.of([1, 2, 3]), bytes(12), (VersionRun(Version(0, 0), 3),)))
    (row,) = items([whole(1, log)], VOCABULARY)
    assert row.targets.tolist() == [2, 3]
    only = TokenSequence()
    only.append_sampled(Generated(Segment.of([1]), bytes(4), (VersionRun(Version(0, 0), 1),)))
    assert items([whole(1, only)], VOCABULARY) == []
    assert all(row.trajectory != 8 for row in items(samples(), VOCABULARY))


def test_every_sequence_of_a_trajectory_counts():
    rng = np.random.default_rng(1)
    logs = tuple(conversation(rng, [1, 2, number], [(3, 0)]) for number in range(2))
    assert len(items([whole(1, *logs)], VOCABULARY)) == 2


def test_every_action_has_the_advantage_of_its_turn():
    """Whatever separates turns: an observation, nothing at all, or a new sequence; a turn may also say nothing."""
    rng = np.random.default_rng(1)
    logs = (conversation(rng, [1, 2], [(3, 2), (2, 0), (0, 0), (1, 4)]), conversation(rng, [3], [(2, 0)]))
    turns = tuple(Turn(tokens, advantage) for tokens, advantage in ((3, 0.1), (2, 0.2), (0, 9.0), (1, 0.3), (2, 0.4)))
    first, second = items([TrainSample(1, 1, "t", logs, turns, 0.0)], VOCABULARY)
    assert first.turns.tolist() == [0, 0, 0, 1, 1, 3]
    assert first.advantages == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.2, 0.3])
    assert second.turns.tolist() == [4, 4]
    assert second.advantages == pytest.approx([0.4, 0.4])


def test_turns_follow_the_tokens_that_are_predicted():
    log = TokenSequence()  # its first token is sampled, and predicted by nothing
    log.append_sampled(Generated(Segment.of([1]), bytes(4), (VersionRun(Version(0, 0), 1),)))
    log.append_context(Segment.of([5]))
    log.append_sampled(Generated(Segment.of([2, 3]), bytes(8), (VersionRun(Version(0, 0), 2),)))
    (row,) = items([TrainSample(1, 1, "t", (log,), (Turn(1, 7.0), Turn(2, 0.5)), 0.0)], VOCABULARY)
    assert row.advantages.tolist() == [0.5, 0.5]
    assert row.turns.tolist() == [1, 1]


def test_turns_that_do_not_fit_their_tokens_are_refused():
    log = conversation(np.random.default_rng(1), [1], [(3, 0)])
    with pytest.raises(Untrainable, match="trajectory 4 sampled 3 tokens, but its turns have 2"):
        items([TrainSample(4, 1, "t", (log,), (Turn(2, 1.0),), 0.0)], VOCABULARY)


def test_what_cannot_be_trained_is_named():
    simulated, alien = TokenSequence(), TokenSequence()
    simulated.append_sampled(Generated(Segment(5), None, (VersionRun(Version(0, 0), 5),)))
    alien.append_sampled(Generated(Segment.of([VOCABULARY]), bytes(4), (VersionRun(Version(0, 0), 1),)))
    for log, reason in ((simulated, "trajectory 7.*simulated"), (alien, "trajectory 7.*vocabulary")):
        with pytest.raises(Untrainable, match=reason):
            items([whole(7, log)], VOCABULARY)
