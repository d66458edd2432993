"""A function behind a URL, called as if it were here."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from reward_server import PATIENCE_S, RewardServer, hang, status

from rollart.backends.rewards.remote_function import RemoteFunction
from rollart.types.errors import RequestError, RewardFault
from rollart.types.transcript import Transcript, TranscriptTurn


def length(t: Transcript) -> float:
    return float(len(t.final_text))


def above_least(group: list[Transcript]) -> list[float]:
    least = min(len(t.final_text) for t in group)
    return [float(len(t.final_text) - least) for t in group]


def said(*texts):
    return [
        Transcript(task="t", trajectory=n, prompt_id="p", seed=0, member=n, turns=(TranscriptTurn("?", text),))
        for n, text in enumerate(texts)
    ]


def test_transcripts_give_numbers():
    with RewardServer(f"{__name__}:length") as server:
        function = RemoteFunction(server.url)
        assert function(said("four")[0]) == 4.0
        assert function(said("four", "x", "")) == [4.0, 1.0, 0.0]
        assert len(server.seen) == 4
        assert len({seen.headers["idempotency-key"] for seen in server.seen}) == 4
        assert (function.use.calls, function.use.requests) == (4, 4)
        function.close()


def test_a_group_is_one_call():
    with RewardServer(f"{__name__}:above_least") as server:
        function = RemoteFunction(server.url, group=True)
        assert function(said("four", "x", "")) == [4.0, 1.0, 0.0]
        assert len(server.seen) == 1
        function.close()


def test_no_transcripts_give_no_numbers():
    for group in (False, True):
        function = RemoteFunction("http://127.0.0.1:1/", group=group)
        assert function([]) == []
        function.close()


@pytest.mark.timeout(60)
def test_calls_that_are_open_at_the_end_or_made_after_it_fail():
    arrived = threading.Event()

    async def silent(number, seen):  # noqa: ARG001
        arrived.set()
        await hang()

    with RewardServer(f"{__name__}:length", silent) as server, ThreadPoolExecutor(1) as pool:
        function = RemoteFunction(server.url)
        call = pool.submit(function, said("four")[0])
        assert arrived.wait(PATIENCE_S)
        function.close()
        with pytest.raises(RewardFault, match="closed"):
            call.result()
        with pytest.raises(RewardFault, match="closed"):
            function(said("four")[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("named", "why"), [({"url": "http://[::1/judge"}, "URL"), ({"secret_as": "Bearer"}, "'bearer'")]
)
def test_what_cannot_be_called_is_refused(named, why):
    with pytest.raises(RequestError, match=why):
        RemoteFunction(**{"url": "http://127.0.0.1:1/", **named})


def test_a_failure_is_raised_with_its_cause():
    async def refuse(number, seen):  # noqa: ARG001
        return status(403)

    with RewardServer(f"{__name__}:length", refuse) as server:
        function = RemoteFunction(server.url)
        with pytest.raises(RewardFault, match=r"score: it answered 403.*secret"):
            function(said("x")[0])
        function.close()
