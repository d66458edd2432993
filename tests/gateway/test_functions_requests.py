"""Requests to served reward functions: secrets, routes, bodies."""

import json

import msgspec
import pytest
from served_function import SECRET, call, request, transcript

from rollart.gateway.functions.answers import Refusal
from rollart.gateway.functions.memory import Memory, identity
from rollart.gateway.functions.openapi import document
from rollart.gateway.functions.requests import MAX_CALLS, SIGNATURE, Secret, check_size, parse, route_of
from rollart.ports.reward import RewardKind
from rollart.types.reward_signature import signature
from rollart.types.reward_wire import FunctionAnswer, FunctionCall
from rollart.types.transcript import Transcript

NOW = 1_800_000_000.0


def refused(function, *arguments):
    with pytest.raises(Refusal) as found:
        function(*arguments)
    return found.value


def decoded(body):
    return parse(body, RewardKind.GROUP).calls


# --- the secret -----------------------------------------------------------------------------------------------------


def test_a_bearer_secret_lets_in():
    for scheme in ("Bearer", "bearer", "BEARER"):
        Secret(SECRET).check({"authorization": f"{scheme} {SECRET}"}, b"", NOW)


@pytest.mark.parametrize("sent", ["", SECRET, "Bearer", "Bearer x", f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer é"])
def test_without_it_nobody_gets_in(sent):
    refusal = refused(Secret(SECRET).check_headers, {"authorization": sent}, NOW)
    assert (refusal.status, refusal.headers["www-authenticate"]) == (401, "Bearer")
    assert SECRET not in refusal.answer().body.decode()


def test_a_signature_lets_in_the_body_it_was_made_for():
    secret = Secret(SECRET)
    headers = {SIGNATURE: signature(SECRET, NOW, b"{}")}
    secret.check(headers, b"{}", NOW + 299)
    for body, now in ((b"{} ", NOW), (b"{}", NOW + 301), (b"{}", NOW - 301)):
        assert refused(secret.check, headers, body, now).status == 401
    assert refused(secret.check, {SIGNATURE: signature("other", NOW, b"{}")}, b"{}", NOW).status == 401
    for header in ("nonsense", "t=1", f"t={'9' * 400},v1={'0' * 64}", f"t={'9' * 5000},v1={'0' * 64}"):
        assert refused(secret.check, {SIGNATURE: header}, b"{}", NOW).status == 401
        assert refused(secret.check_headers, {SIGNATURE: header}, NOW).status == 401


def test_a_deployment_without_its_secret_is_closed_unless_it_is_declared_open():
    refusal = refused(Secret(variable="MY_SECRET").check_headers, {"authorization": "Bearer "}, NOW)
    assert refusal.status == 403
    assert "MY_SECRET" in refusal.message
    Secret(open=True).check({}, b"", NOW)


# --- routes and sizes -----------------------------------------------------------------------------------------------


def test_platforms_may_add_a_prefix():
    assert [route_of("POST", path) for path in ("/", "", "/fn", "/v1/fn/")] == ["/"] * 4
    assert route_of("GET", "/fn/health") == route_of("HEAD", "/health") == "/health"
    assert route_of("GET", "/openapi.json") == "/openapi.json"


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", "/", "POST"), ("POST", "/health", "GET")])
def test_another_method_names_the_right_one(method, path, allowed):
    refusal = refused(route_of, method, path)
    assert (refusal.status, refusal.headers["allow"]) == (405, allowed)


def test_a_body_is_refused_by_its_announced_length():
    check_size("", 10)
    check_size("10", 10)
    assert refused(check_size, "11", 10).status == 413
    assert refused(check_size, "9" * 50, 10).status == 413
    assert refused(check_size, "-1", 10).status == 422
    assert refused(check_size, "²", 10).status == 422


# --- bodies ---------------------------------------------------------------------------------------------------------


def test_a_request_is_parsed():
    got = parse(request(call(1), call(2), deadline_s=3), RewardKind.TRAJECTORY)
    assert got.deadline_s == 3.0
    assert [each.key for each in got.calls] == ["1/reward", "2/reward"]
    assert got.calls[0].transcripts[0] == msgspec.convert(transcript(1), Transcript)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        request()[:-1],
        request(deadline_s=0),
        request(deadline_s=-1),
        request(deadline_s=1e9),
        request().replace(b"250.0", b"1e999"),
        request().replace(b"250.0", b"NaN"),
        json.dumps({"calls": [], "deadline_s": 1}).encode(),
        request(call(1) | {"key": ""}),
        request(call(1) | {"key": "k" * 513}),
        request(call(1) | {"transcripts": []}),
        request(call(1, transcript() | {"trajectory": "one"})),
        request(call(1, transcript() | {"artifact": "not base64!"})),
        request(call(1)).replace(b"math", b"\\ud800"),
        request(*[call(1)] * (MAX_CALLS + 1)),
    ],
)
def test_what_is_malformed_is_refused_with_422(body):
    refusal = refused(parse, body, RewardKind.TRAJECTORY)
    assert (refusal.status, refusal.code) == (422, "malformed")
    refusal.answer()


def test_limits_at_the_limit():
    assert len(parse(request(*[call(1)] * MAX_CALLS), RewardKind.TRAJECTORY).calls) == MAX_CALLS
    parse(request(call(1) | {"key": "k" * 512}, deadline_s=86400), RewardKind.TRAJECTORY)


def test_a_group_is_for_functions_that_see_one():
    body = request(call(1, transcript(1), transcript(2)))
    assert len(parse(body, RewardKind.GROUP).calls[0].transcripts) == 2
    assert "one transcript at a time" in refused(parse, body, RewardKind.TRAJECTORY).message


# --- memory ---------------------------------------------------------------------------------------------------------


def test_calls_are_told_apart_by_key_and_content():
    first, same, other_key, other_text = decoded(
        request(call(1), call(1), call(2, transcript(1)), call(1, transcript(1, text="43")))
    )
    assert identity(first) == identity(same)
    assert len({identity(first), identity(other_key), identity(other_text)}) == 3


def test_numbers_of_any_size_can_be_told_apart():
    huge = transcript() | {"prompt": {"answer": 10**30}}
    (found,) = decoded(request(call(1, huge)))
    assert identity(found)


def test_the_memory_forgets_the_oldest_and_never_remembers_what_a_retry_may_cure():
    memory = Memory(max_answers=2)
    keys = [identity(FunctionCall(str(number), ())) for number in range(4)]
    memory.remember(keys[3], FunctionAnswer("3", error="away", retry=True))
    for number in range(3):
        memory.remember(keys[number], FunctionAnswer(str(number), (1.0,)))
    assert [memory.recall(key) is not None for key in keys] == [False, True, True, False]


def test_the_memory_is_bounded_in_bytes():
    memory = Memory(max_bytes=500)
    for number in range(10):
        memory.remember(identity(FunctionCall(str(number), ())), FunctionAnswer(str(number), error="x" * 150))
    kept = [number for number in range(10) if memory.recall(identity(FunctionCall(str(number), ())))]
    assert kept == [8, 9]


# --- the document ---------------------------------------------------------------------------------------------------


def test_the_document_states_the_limits_of_the_kind():
    one = json.loads(document("f.py:one", RewardKind.TRAJECTORY, "1", secret=True))
    group = json.loads(document("f.py:all", RewardKind.GROUP, "1", secret=False))
    place = ("components", "schemas", "FunctionCall", "properties", "transcripts")
    for tree, limit in ((one, 1), (group, None)):
        found = tree
        for step in place:
            found = found[step]
        assert found.get("maxItems") == limit
    assert one["security"]
    assert "security" not in group
    assert set(one["paths"]) == {"/", "/health", "/openapi.json"}
