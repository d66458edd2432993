"""Shares of a batch: every sample once, mini-batches independent of ranks, ranks balanced."""

import pickle

import pytest

from rollart.types.rank_shares import split
from rollart.types.tokens import LOGPROB, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version


def sample(number, tokens, *, advantage=1.0, masked=False, sampled=2):
    log = TokenSequence()
    log.append_context(Segment.of([1] * (tokens - sampled)))
    log.append_sampled(
        Generated(Segment.of([2] * sampled), bytes(sampled * LOGPROB.itemsize), (VersionRun(Version(0, 0), sampled),))
    )
    return TrainSample(number, number // 4, "t", (log,), (Turn(sampled, advantage),), 0.0, masked)


def batch(count=40):
    """Every fifth has no advantage."""
    return [sample(number, 10 + 37 * number % 50, advantage=float(number % 5 > 0)) for number in range(count)]


def tokens(samples):
    return sum(sequence.length for each in samples for sequence in each.sequences)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_every_sample_is_in_one_share(ranks, minibatches):
    own = [*batch(), sample(90, 20, masked=True), sample(91, 20, sampled=0)]
    shares = split(own, ranks, minibatches)
    assert len(shares) == ranks
    assert sorted(each.trajectory for share in shares for each in share.samples) == list(range(40))
    of_batch = {
        each.trajectory: number for share in shares for each, number in zip(share.samples, share.batches, strict=True)
    }
    assert of_batch == {number: number % minibatches for number in range(40)}  # however many ranks there are
    assert {share.minibatches for share in shares} == {minibatches}


def test_ranks_have_nearly_the_same_to_do():
    shares = split(batch(), 4, 2)
    for number in range(2):
        for moves in (True, False):
            sizes = [
                tokens(
                    each
                    for each, of in zip(share.samples, share.batches, strict=True)
                    if of == number and bool(each.turns[0].advantage) == moves
                )
                for share in shares
            ]
            assert max(sizes) - min(sizes) <= 2 * 60  # two samples, of sixteen or four


def test_groups_mostly_stay_together():
    shares = split(batch(), 2, 1)
    apart = {each.group for each in shares[0].samples} & {each.group for each in shares[1].samples}
    assert len(apart) <= 2  # one for each cut


def test_fewer_samples_than_ranks_or_mini_batches():
    shares = split(batch(2), 4, 8)
    assert sum(len(share.samples) for share in shares) == 2
    assert {share.minibatches for share in shares} == {2}
    assert [share.samples for share in split([], 3, 2)] == [()] * 3


def test_a_share_survives_pickling():
    (share,) = split(batch(3), 1, 1)
    again = pickle.loads(pickle.dumps(share))
    assert again.batches == share.batches
    for left, right in zip(share.samples, again.samples, strict=True):
        assert left.turns == right.turns
        assert left.sequences[0].pack() == right.sequences[0].pack()
        assert left.sequences[0].turn_digest == right.sequences[0].turn_digest
