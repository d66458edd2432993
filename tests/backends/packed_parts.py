"""Groups of conversations as samples, for tests of everything that packs them."""

import math

import numpy as np
from parts import VOCABULARY

from rollart.types.tokens import LOGPROB, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version


def conversation(rng, prompt, turns):
    """A sequence: a prompt, then for each turn the given numbers of sampled and observed tokens."""
    log = TokenSequence()
    log.append_context(Segment.of(prompt))
    for sampled, observed in turns:
        tokens = Segment.of(rng.integers(0, VOCABULARY, sampled))
        logprobs = (rng.normal(-math.log(VOCABULARY), 0.1, sampled)).astype(LOGPROB).tobytes()
        log.append_sampled(Generated(tokens, logprobs, (VersionRun(Version(0, 0), sampled),)))
        log.append_context(Segment.of(rng.integers(0, VOCABULARY, observed)))
    return log


def samples(seed=0):
    """Two groups with a prompt each, members of different lengths, one of a single action; a lone one; a masked one.

    Every turn has an advantage of its own.
    """
    rng = np.random.default_rng(seed)
    shapes = [
        (17, [[(5, 3), (4, 2)], [(9, 0)], [(1, 0)], [(3, 4), (2, 0)]]),
        (9, [[(6, 5)], [(2, 2), (2, 2), (7, 0)], [(1, 3)]]),
        (1, [[(12, 0)]]),
    ]
    out = []
    for group, (length, members) in enumerate(shapes):
        prompt = rng.integers(0, VOCABULARY, length)
        for turns in members:
            log = conversation(rng, prompt, turns)
            credit = tuple(Turn(sampled, float(rng.normal())) for sampled, _ in turns)
            out.append(TrainSample(len(out), group, "t", (log,), credit, 0.0))
    masked = conversation(rng, rng.integers(0, VOCABULARY, 8), [(5, 0)])
    out.append(TrainSample(len(out), 0, "t", (masked,), (Turn(5, 9.0),), 0.0, True))
    return tuple(out)


def branching(seed=0, instructions=10):
    """Two groups of a task with common instructions; members go the same way for a while, two of them to the end."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, VOCABULARY, instructions)
    out = []
    for group in range(2):
        prompt = np.concatenate((common, rng.integers(0, VOCABULARY, 4)))
        way = [rng.integers(0, VOCABULARY, size) for size in (3, 5, 2, 6, 4, 3)]  # sampled and observed in turn
        for stays in (6, 6, 4, 3, 2, 1, 0):
            log = TokenSequence()
            log.append_context(Segment.of(prompt))
            turns = []
            for number, part in enumerate(way):
                tokens = part if number < stays else rng.integers(0, VOCABULARY, part.size)
                if number % 2:
                    log.append_context(Segment.of(tokens))
                else:
                    logprobs = rng.normal(-5.0, 0.1, part.size).astype(LOGPROB).tobytes()
                    log.append_sampled(Generated(Segment.of(tokens), logprobs, (VersionRun(Version(0, 0), part.size),)))
                    turns.append(Turn(part.size, float(rng.normal())))
            out.append(TrainSample(len(out), group, "t", (log,), tuple(turns), 0.0))
    return tuple(out)
