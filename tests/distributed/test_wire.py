import math
from typing import get_args

import msgspec
import numpy as np
import pytest

from rollart.distributed.wire import Died, Message, decode, encode
from rollart.types import messages
from rollart.types.messages import (
    Add,
    EngineInfo,
    EpisodeRecord,
    FinishReason,
    KvOnUpdate,
    Progress,
    Published,
    Reset,
    Sampling,
    Scored,
    ScoreRequest,
    Suspend,
    TaskWork,
    Train,
    Trained,
    TrainerInfo,
    TurnDone,
    TurnUsage,
)
from rollart.types.tokens import EMPTY, NOTHING, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import Prompt, TrainSample, Turn
from rollart.types.versions import Version
from rollart.types.weights import Manifest, TensorEntry, WeightKind

GENERATED = Generated(Segment.of([1, 2]), b"12345678", (VersionRun(Version(0, 3), 2),))
PROMPT = Prompt("p", "t", 7, {"board": [1, 2.5, None, {"deep": "ü"}]})
MANIFEST = Manifest(
    Version(1, 2), None, WeightKind.ADAPTER, (TensorEntry("w", "float32", (2, 3), 0, 0, 24),), (24,), ("digest",)
)


def test_messages_arrive_as_they_were_in_their_order():
    batch = [
        EngineInfo(8, 512, KvOnUpdate.KEEP),
        Add(1, 2, "t", 3, b"\0\xff", Segment(5), Sampling(4, stop_tokens=(1, 2), stop_strings=("</a>",))),
        Suspend(),
        TurnDone(1, GENERATED, FinishReason.LENGTH, TurnUsage(1, 2, 3)),
        Progress(((1, GENERATED), (2, NOTHING)), 3),
        Reset(1, 0, PROMPT, 2),
        ScoreRequest("k", "t", "r", (EpisodeRecord(1, 7, (0.5, -1.0), True, b"\0" * 9), EpisodeRecord(2, 7))),
        Scored("k", (0.5, -1.0), ({"a": 0.25, "b": 0.25}, {"a": -1.0})),
        Published(MANIFEST),
        Trained(1, Version(0, 1), {"loss": 0.25, "grad_norm": math.inf}),
        TrainerInfo(10, Version(0, 2)),
        Suspend(),
        Died("why"),
    ]
    assert decode(encode(batch)) == batch
    assert decode(encode([])) == []


def test_every_message_has_a_name_of_its_own():
    kinds = get_args(Message)
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    declared = {
        value
        for name, value in vars(messages).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == messages.__name__
    }
    parts = {EpisodeRecord, Sampling, TaskWork, TurnUsage}
    assert declared - parts <= set(kinds)


def test_a_batch_for_the_trainer_arrives_whole():
    def sequence(simulated: bool) -> TokenSequence:
        made = TokenSequence()
        for turn in range(3):
            made.append_context(Segment(4, None if simulated else bytes([turn]) * 16))
            tokens = Segment(2, None if simulated else bytes([turn + 100]) * 8)
            made.append_sampled(
                Generated(tokens, None if simulated else b"1234" * 2, (VersionRun(Version(0, turn), 2),))
            )
        made.append_context(Segment(1, None if simulated else b"last"))
        return made

    sent = [sequence(False), sequence(True), TokenSequence()]
    train = Train(3, Version(0, 4), (TrainSample(1, 2, "t", tuple(sent), (Turn(3, 0.5),), 1.0, True),))
    (got,) = decode(encode([train]))
    assert msgspec.structs.replace(got.samples[0], sequences=()) == msgspec.structs.replace(
        train.samples[0], sequences=()
    )
    for before, after in zip(sent, got.samples[0].sequences, strict=True):
        for name in ("length", "sampled", "turn_length", "turn_digest"):
            assert getattr(after, name) == getattr(before, name)
        assert (after.whole(), after.since_turn(), after.runs()) == (before.whole(), before.since_turn(), before.runs())
        assert after.action_mask().tolist() == before.action_mask().tolist()
        more = Generated(Segment.of([9]), b"more", (VersionRun(Version(0, 9), 1),))
        for each in (before, after):
            each.append_sampled(more)
        assert after.turn_digest == before.turn_digest
        assert after.runs() == before.runs()
    assert got.samples[0].sequences[0].logprobs().tolist() == sent[0].logprobs().tolist()


def test_numbers_of_numpy_travel_as_numbers():
    (got,) = decode(encode([Trained(np.int64(3), Version(0, 1), {"loss": np.float32(0.5)})]))
    assert got == Trained(3, Version(0, 1), {"loss": 0.5})


def test_what_is_no_plain_data_is_refused():
    with pytest.raises(TypeError, match="a message holds a object"):
        encode([Trained(1, Version(0, 1), {"loss": object()})])
    with pytest.raises(TypeError, match="Prompt is not a message"):
        encode([PROMPT])


def test_a_message_of_another_shape_is_refused():
    blob = encode([Reset(1, 0, PROMPT, 2)]).replace(b"episode", b"episodf")
    with pytest.raises(msgspec.ValidationError, match="episode"):
        decode(blob)
    assert decode(encode([Reset(1, 0, PROMPT, 2)]))[0].prompt.data == PROMPT.data
    assert decode(encode([Add(1, 2, "t", 0, b"", EMPTY, Sampling(1))]))[0].new == EMPTY
