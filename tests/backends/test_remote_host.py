"""A reward behind a URL: what is sent, what is accepted, and what a service may do without costing a reward."""

import asyncio
import http.server
import math
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import msgspec
import pytest
from parts import PATIENCE_S, RewardDriver
from reward_server import RewardServer, hang, json, status
from starlette.responses import Response

from rollart.backends.rewards.pacing import MIN_KNOWN, Breaker
from rollart.backends.rewards.remote_answers import LONGEST_REASON
from rollart.backends.rewards.remote_client import MAX_SENDS, _replica_s
from rollart.backends.rewards.remote_exchange import Exchanged
from rollart.backends.rewards.remote_host import RemoteHost
from rollart.types.errors import RequestError
from rollart.types.messages import EpisodeRecord, Scored, ScoreFailed, ScoreRequest
from rollart.types.reward_signature import is_signed
from rollart.types.reward_wire import MAX_RESPONSE_BYTES, FunctionAnswer, FunctionResponse
from rollart.types.transcript import Transcript, TranscriptTurn, pack

SECRET = "s3cret-of-a-function"
ROUTE = "t/length"


def length(t: Transcript) -> float:
    return float(len(t.final_text))


def question(number, text="four", deadline_s=PATIENCE_S):
    t = Transcript(task="t", trajectory=number, prompt_id="p", seed=0, member=0, turns=(TranscriptTurn("?", text),))
    return ScoreRequest(f"{number}", "t", "length", (EpisodeRecord(number, 0, transcript=pack(t)),), deadline_s)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def server(stack, misbehave=None):
    made = RewardServer(f"{__name__}:length")
    if misbehave is not None:
        made.misbehave = misbehave
    return stack.enter_context(made)


def client(stack, url, **settings):
    driver = RewardDriver(RemoteHost, {"url": url, **settings})
    stack.callback(driver.worker.close)
    return driver


def ask(driver, *questions):
    driver.send(*questions)
    return {answer.key: answer for answer in driver.answers(len(questions))}


def first(times, *responses):
    """Answer the first requests with these responses, `times` over, then behave."""
    given = [each for each in responses for _ in range(times)]

    async def misbehave(number, seen):  # noqa: ARG001
        return given[number] if number < len(given) else None

    return misbehave


def test_values_and_what_they_took(stack):
    service = server(stack)
    driver = client(stack, service.url, price=2.0)
    assert ask(driver, question(1), question(2, "x")) == {"1": Scored("1", (4.0,)), "2": Scored("2", (1.0,))}
    use = driver.uses[ROUTE]
    assert (use.calls, use.failed, use.requests, use.retries, use.cold_starts) == (2, 0, 2, 0, 1)
    assert use.bytes_out == sum(len(seen.body) for seen in service.seen)
    assert use.bytes_in > 0
    assert use.replica_s == pytest.approx(2e-6)
    assert use.cost == pytest.approx(4e-6)


def test_every_request_has_key_trace_and_deadline(stack):
    service = server(stack, first(2, status(500)))
    driver = client(stack, service.url, function=f"{__name__}:length")
    ask(driver, question(7, deadline_s=50.0))
    keys = {seen.headers["idempotency-key"] for seen in service.seen}
    traces = [re.fullmatch("00-([0-9a-f]{32})-([0-9a-f]{16})-01", seen.headers["traceparent"]) for seen in service.seen]
    assert len(service.seen) == 3
    assert keys == {"7"}
    assert len({trace[1] for trace in traces}) == 1
    assert len({trace[2] for trace in traces}) == 3
    assert all(0.0 < seen.request.deadline_s <= 50.0 for seen in service.seen)
    assert "authorization" not in service.seen[0].headers
    assert driver.uses[ROUTE].retries == 2


def test_the_secret_goes_out_as_bearer_token_or_signature(stack, monkeypatch):
    monkeypatch.setenv("JUDGE_SECRET", SECRET)
    service = server(stack)
    ask(client(stack, service.url, secret="JUDGE_SECRET"), question(1))
    ask(client(stack, service.url, secret="JUDGE_SECRET", secret_as="signature"), question(2))
    bearer, signed = service.seen
    assert bearer.headers["authorization"] == f"Bearer {SECRET}"
    assert "authorization" not in signed.headers
    assert is_signed(signed.headers["x-rollart-signature"], SECRET, time.time(), signed.body)
    assert not is_signed(signed.headers["x-rollart-signature"], SECRET, time.time(), signed.body + b" ")
    assert SECRET.encode() not in signed.body


@pytest.mark.parametrize(("value", "why"), [(None, "NO_SUCH is not set"), ("two words", "has spaces")])
def test_a_secret_that_cannot_be_used_is_named_but_not_shown(monkeypatch, value, why):
    monkeypatch.delenv("NO_SUCH", raising=False)
    if value:
        monkeypatch.setenv("NO_SUCH", value)
    with pytest.raises(RequestError, match=why) as error:
        RemoteHost({"url": "https://fn.example", "secret": "NO_SUCH"}, lambda: None)
    assert value is None or value not in str(error.value)


def test_a_secret_that_the_service_repeats_does_not_reach_the_reason(stack, monkeypatch):
    monkeypatch.setenv("JUDGE_SECRET", SECRET)
    service = server(stack, first(1, status(401, f"who is {SECRET}?")))
    (failed,) = ask(client(stack, service.url, secret="JUDGE_SECRET"), question(1)).values()
    assert isinstance(failed, ScoreFailed)
    assert not failed.retry
    assert "401" in failed.reason
    assert SECRET not in failed.reason


@pytest.mark.parametrize(
    "response",
    [
        json({"answers": [{"key": "1", "error": f"bad token {SECRET}"}]}),
        status(404, "x" * (LONGEST_REASON - len(SECRET) // 2) + SECRET),
        status(404, "x" * (LONGEST_REASON - len(SECRET)) + f" {SECRET}"),
    ],
)
def test_no_part_of_a_secret_that_the_service_repeats_is_kept(stack, monkeypatch, response):
    monkeypatch.setenv("JUDGE_SECRET", SECRET)
    service = server(stack, first(1, response))
    (failed,) = ask(client(stack, service.url, secret="JUDGE_SECRET"), question(1)).values()
    assert SECRET[:4] not in failed.reason


def test_names_of_parts_do_not_have_the_secret(stack, monkeypatch):
    monkeypatch.setenv("JUDGE_SECRET", SECRET)
    service = server(stack, first(1, json({"answers": [{"key": "1", "values": [1.0], "parts": [{SECRET: 1.0}]}]})))
    (scored,) = ask(client(stack, service.url, secret="JUDGE_SECRET"), question(1)).values()
    assert scored.parts == ({"[secret]": 1.0},)


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_a_service_that_fails_for_a_moment_costs_nothing(stack, code):
    service = server(stack, first(3, status(code)))
    assert ask(client(stack, service.url), question(1)) == {"1": Scored("1", (4.0,))}
    assert service.computed == 1


def test_what_fails_again_and_again_is_given_back(stack):
    service = server(stack, first(MAX_SENDS, status(500, "out of memory")))
    (failed,) = ask(client(stack, service.url), question(1)).values()
    assert failed.retry
    assert re.fullmatch(r"http://.*/score: it answered 500 \(out of memory\)", failed.reason)
    assert len(service.seen) == MAX_SENDS


def test_retry_after_is_honoured(stack):
    times = []

    async def misbehave(number, seen):  # noqa: ARG001
        times.append(time.monotonic())
        return status(429, Retry_After="1") if number == 0 else None

    service = server(stack, misbehave)
    driver = client(stack, service.url)
    driver.send(question(1))
    driver.slice()
    deadline = time.monotonic() + PATIENCE_S
    while not times:  # the other one comes while the service is busy, and waits as well
        assert time.monotonic() < deadline
        time.sleep(0.001)
    driver.send(question(2))
    assert {answer.key for answer in driver.answers(2)} == {"1", "2"}
    assert all(at - times[0] >= 1.0 or index == 1 for index, at in enumerate(times[1:], 1))
    assert times[-1] - times[0] >= 1.0


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (status(302, Location="http://127.0.0.1:1/"), "redirect"),
        (status(308, Location="http://127.0.0.1:1/"), "redirect"),
        (status(401), "secret"),
        (status(403), "secret"),
        (status(404), "404"),
        (status(413), "413"),
        (status(422, "not of this form"), "not of this form"),
        (Response(b" " * (MAX_RESPONSE_BYTES + 1)), "larger than"),
        (json({"answers": [{"key": "1", "values": ["1.0"]}]}), "form"),
        (json({"answers": [{"key": "1", "values": [True]}]}), "form"),
        (json({"answers": [{"key": "1", "values": [None]}]}), "form"),
        (json({"answers": [{"key": "1", "values": 1.0}]}), "form"),
        (json({"answer": 1.0}), "form"),
        (Response(b'{"answers": [{"key": "1", "values": [NaN]}]}'), "not finite"),
        (Response(b'{"answers": [{"key": "1", "values": [-Infinity]}]}'), "not finite"),
        (Response(b'{"answers": [{"key": "1", "values": [1e999]}]}'), "out of range"),
        (json({"answers": [{"key": "1", "values": []}]}), "0 numbers for 1"),
        (json({"answers": [{"key": "1", "values": [1.0, 2.0]}]}), "2 numbers for 1"),
        (json({"answers": [{"key": "1", "values": [1.0], "parts": [{"a": 2.0}]}]}), "do not add up"),
        (json({"answers": [{"key": "1", "values": [1.0], "parts": [{}, {}]}]}), "2 rewards"),
        (json({"answers": [{"key": "1", "error": "TypeError: no"}]}), "TypeError: no"),
    ],
)
def test_what_is_no_reward_is_refused_for_good(stack, response, why):
    service = server(stack, first(1, response))
    driver = client(stack, service.url)
    (failed,) = ask(driver, question(1)).values()
    assert isinstance(failed, ScoreFailed), failed
    assert not failed.retry
    assert why in failed.reason
    assert len(service.seen) == 1
    assert driver.uses[ROUTE].failed == 1


@pytest.mark.parametrize(
    "response",
    [
        Response(b"<html>starting</html>"),
        json({"answers": []}),
        json({"answers": [{"key": "other", "values": [9.0]}]}),
    ],
)
def test_a_response_without_the_answer_is_asked_for_again(stack, response):
    service = server(stack, first(1, response))
    assert ask(client(stack, service.url), question(1)) == {"1": Scored("1", (4.0,))}


def test_an_error_that_may_pass_is_given_back_at_once(stack):
    """The function ran and said so: whether to run it again is the controller's decision."""
    service = server(stack, first(1, json({"answers": [{"key": "1", "error": "OSError: 429", "retry": True}]})))
    driver = client(stack, service.url)
    assert ask(driver, question(1)) == {"1": ScoreFailed("1", "OSError: 429", retry=True)}
    assert ask(driver, question(1)) == {"1": Scored("1", (4.0,))}


def test_an_answer_that_comes_twice_counts_once(stack):
    async def misbehave(number, seen):
        if number == 0:
            return json(
                {"answers": [{"key": "1", "values": [4.0]}, {"key": "1", "values": [9.0]}, {"key": "x", "values": []}]}
            )
        return await service.answer(seen, times=2)

    service = server(stack, misbehave)
    driver = client(stack, service.url)
    assert ask(driver, question(1)) == {"1": Scored("1", (4.0,))}
    assert ask(driver, question(2)) == {"2": Scored("2", (4.0,))}
    assert driver.rest() == []


def test_a_service_that_hangs_is_given_up_at_the_deadline_and_its_late_answer_is_void(stack):
    late, over = asyncio.Event(), threading.Event()

    async def misbehave(number, seen):
        if number:
            return None
        try:
            await late.wait()
            return await service.answer(seen)
        finally:
            over.set()

    service = server(stack, misbehave)
    driver = client(stack, service.url)
    (failed,) = ask(driver, question(1, deadline_s=0.3)).values()
    assert failed == ScoreFailed("1", "no answer within 0.3 s", retry=True)
    assert ask(driver, question(1)) == {"1": Scored("1", (4.0,))}
    service.loop.call_soon_threadsafe(late.set)
    assert over.wait(PATIENCE_S)
    assert driver.rest() == []
    assert driver.uses[ROUTE].calls == 2


def test_a_late_request_is_sent_again_under_its_key_and_the_first_answer_counts(stack):
    async def misbehave(number, seen):  # noqa: ARG001
        return await hang() if number == 2 * MIN_KNOWN else None

    service = server(stack, misbehave)
    driver = client(stack, service.url)
    for number in range(2 * MIN_KNOWN):
        ask(driver, question(number))
    assert ask(driver, question(99)) == {"99": Scored("99", (4.0,))}
    assert [seen.headers["idempotency-key"] for seen in service.seen[-2:]] == ["99", "99"]
    assert driver.uses[ROUTE].hedges >= 1  # on a busy machine others may be late as well
    assert driver.uses[ROUTE].retries == 0


def test_nothing_is_hedged_on_request(stack):
    async def misbehave(number, seen):  # noqa: ARG001
        return await hang() if number == 2 * MIN_KNOWN else None

    service = server(stack, misbehave)
    driver = client(stack, service.url, hedge=False)
    for number in range(2 * MIN_KNOWN):
        ask(driver, question(number))
    assert isinstance(ask(driver, question(99, deadline_s=0.5))["99"], ScoreFailed)
    assert driver.uses[ROUTE].hedges == 0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_a_service_out_of_reach_is_replaced_by_the_function_itself(stack):
    driver = client(
        stack, f"http://127.0.0.1:{free_port()}/", fallback=True, function=f"{__name__}:length", slots=Breaker.FAILURES
    )
    questions = [question(number) for number in range(Breaker.FAILURES)]
    assert set(ask(driver, *questions).values()) == {Scored(str(n), (4.0,)) for n in range(Breaker.FAILURES)}
    assert driver.uses[ROUTE].fallbacks > 0


HANGING_FALLBACK = """
from rollart.backends.rewards.pacing import Breaker
from rollart.backends.rewards.remote_host import RemoteHost
from obedient import OBEY, question

host = RemoteHost({{"url": "http://127.0.0.1:{port}/", "fallback": True, "function": OBEY,
                   "slots": Breaker.FAILURES}}, lambda: None)
host.post([question(number, "say and hang") for number in range(Breaker.FAILURES)])
host.advance(0.0)
with open(0) as stdin:
    stdin.readline()
host.close()
"""


def test_a_fallback_that_hangs_does_not_keep_the_process():
    code = HANGING_FALLBACK.format(port=free_port())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
        try:
            assert process.stdout.readline() == "hanging\n"
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_an_outage_delays_calls_and_costs_none(stack):
    """All calls wait for the service, which is probed by one of them now and then."""
    down = True
    probes = []

    async def misbehave(number, seen):  # noqa: ARG001
        if down:
            probes.append(seen.headers["idempotency-key"])
            return status(500)
        return None

    service = server(stack, misbehave)
    driver = client(stack, service.url)
    calls = 2 * Breaker.FAILURES
    driver.send(*[question(number) for number in range(calls)])
    deadline = time.monotonic() + PATIENCE_S
    while len(probes) <= calls:  # all failed once, and the breaker is open
        assert time.monotonic() < deadline
        driver.slice()
        time.sleep(0.01)
    down = False
    answers = {answer.key: answer for answer in driver.answers(calls)}
    assert set(answers.values()) == {Scored(str(number), (4.0,)) for number in range(calls)}


def test_calls_that_have_to_wait_share_a_request(stack):
    arrived, opened = threading.Event(), asyncio.Event()

    async def misbehave(number, seen):  # noqa: ARG001
        if number == 0:
            arrived.set()
            await opened.wait()

    service = server(stack, misbehave)
    driver = client(stack, service.url, slots=1, batch=4)
    assert driver.worker.info().slots == 4
    driver.send(question(0))
    driver.slice()
    assert arrived.wait(PATIENCE_S)
    driver.send(*[question(number) for number in range(1, 8)])
    driver.slice()
    service.loop.call_soon_threadsafe(opened.set)
    assert len(driver.answers(8)) == 8
    assert [[call.key for call in seen.request.calls] for seen in service.seen] == [
        ["0"],
        ["1", "2", "3", "4"],
        ["5", "6", "7"],
    ]
    assert driver.uses[ROUTE].requests == 3
    assert driver.uses[ROUTE].calls == 8


def test_a_call_that_breaks_its_request_does_not_break_the_others(stack):
    arrived, opened = threading.Event(), asyncio.Event()

    async def misbehave(number, seen):
        if number == 0:
            arrived.set()
            await opened.wait()
        if any(call.transcripts[0].final_text == "poison" for call in seen.request.calls):
            return status(413)
        return None

    service = server(stack, misbehave)
    driver = client(stack, service.url, slots=1, batch=4)
    driver.send(question(0))
    driver.slice()
    assert arrived.wait(PATIENCE_S)
    driver.send(question(1), question(2, "poison"), question(3))
    driver.slice()
    service.loop.call_soon_threadsafe(opened.set)
    answers = {answer.key: answer for answer in driver.answers(4)}
    assert {key for key, answer in answers.items() if isinstance(answer, Scored)} == {"0", "1", "3"}
    assert not answers["2"].retry


def test_the_oldest_call_of_a_batch_does_not_fail_the_others(stack):
    """Of the request with both, the service answers neither in the time that the first one has left."""
    arrived, opened = threading.Event(), asyncio.Event()

    async def misbehave(number, seen):
        if number == 0:
            arrived.set()
            await opened.wait()
        keys = [call.key for call in seen.request.calls]
        if keys != ["1", "2"]:
            return None
        await asyncio.sleep(seen.request.deadline_s)
        return json({"answers": [{"key": key, "error": "it did not finish", "retry": True} for key in keys]})

    service = server(stack, misbehave)
    driver = client(stack, service.url, slots=1, batch=2)
    driver.send(question(0))
    driver.slice()
    assert arrived.wait(PATIENCE_S)
    driver.send(question(1, deadline_s=1.0), question(2))
    driver.slice()
    service.loop.call_soon_threadsafe(opened.set)
    assert {answer.key: answer for answer in driver.answers(3)}["2"] == Scored("2", (4.0,))


def test_a_service_that_refuses_again_and_again_is_asked_less_often(stack):
    async def misbehave(number, seen):  # noqa: ARG001
        return status(503)

    service = server(stack, misbehave)
    (failed,) = ask(client(stack, service.url), question(1, deadline_s=3.0)).values()
    assert failed.retry
    assert len(service.seen) <= 7  # after 0.1, 0.3, 0.7, 1.5 s at the earliest


@pytest.mark.parametrize(
    ("compute_s", "charged_s"), [([1.0] * 8, 8.0), ([0.25], 0.25), ([9.0], 2.0), ([0.0], 2.0), ([-1.0, 0.5], 0.5)]
)
def test_what_a_request_occupied_is_the_sum_of_its_calls(compute_s, charged_s):
    response = FunctionResponse(tuple([FunctionAnswer("", compute_s=each) for each in compute_s]))
    assert _replica_s(Exchanged(response, 2.0, 0)) == charged_s


def test_faults_of_every_kind_at_once_lose_and_double_nothing(stack):
    """30 % errors, 5 % hangs, 5 % answers that come twice; the test asks again as the controller does."""

    async def misbehave(number, seen):
        chance = (number * 0.6180339887) % 1.0
        if chance < 0.3:
            return status(500 if number % 2 else 503)
        if chance < 0.35:
            return await hang()
        if chance < 0.4:
            return await service.answer(seen, times=2)
        return None

    service = server(stack, misbehave)
    driver = client(stack, service.url, slots=16)
    open_ = {str(number): question(number, "x" * (number % 7), deadline_s=2.0) for number in range(200)}
    values = {}
    driver.send(*open_.values())
    while open_:
        for answer in driver.answers():
            if isinstance(answer, Scored):
                assert answer.key not in values
                values[answer.key] = answer.values[0]
                del open_[answer.key]
            else:
                assert answer.retry
                driver.send(open_[answer.key])
    assert values == {str(number): float(number % 7) for number in range(200)}
    assert service.computed == 200
    assert driver.uses[ROUTE].retries > 0


def test_a_transcript_that_cannot_be_read_is_not_sent(stack):
    service = server(stack)
    broken = msgspec.structs.replace(question(1), episodes=(EpisodeRecord(1, 0, transcript=b"\x01junk"),))
    (failed,) = ask(client(stack, service.url), broken).values()
    assert not failed.retry
    assert "transcript" in failed.reason
    assert not service.seen


def test_the_sum_of_the_turns_needs_no_transcript(stack):
    service = stack.enter_context(RewardServer("rollart.backends.rewards.functions:episode_return"))
    driver = client(stack, service.url, function="rollart.backends.rewards.functions:episode_return")
    ask_for = ScoreRequest("1", "t", "length", (EpisodeRecord(1, 0, (0.25, 0.5)),), PATIENCE_S)
    assert ask(driver, ask_for) == {"1": Scored("1", (0.75,))}


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_a_certificate_that_is_not_valid_is_refused_for_good(stack, tmp_path):
    pair = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", "req", *kind, *pair], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    service = stack.enter_context(http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler))
    service.socket = context.wrap_socket(service.socket, server_side=True)
    thread = threading.Thread(target=service.serve_forever, args=(0.01,))
    thread.start()
    stack.callback(thread.join)
    stack.callback(service.shutdown)
    (failed,) = ask(client(stack, f"https://127.0.0.1:{service.server_port}/"), question(1)).values()
    assert not failed.retry
    assert "certificate is not accepted" in failed.reason
    assert "self-signed" in failed.reason


def test_no_tls_behind_an_https_url_is_out_of_reach_and_may_come_back(stack):
    service = server(stack)
    driver = client(stack, service.url.replace("http://", "https://"), slots=1)
    (failed,) = ask(driver, question(1, deadline_s=1.0)).values()
    assert failed.retry
    assert math.isfinite(driver.uses[ROUTE].replica_s)
    assert not service.seen
