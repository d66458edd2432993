"""A served reward function behind its endpoint: once-only, deadlines, limits, failures; the function really runs."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from served_function import PATIENCE_S, SECRET, call, request, transcript, write_functions

from rollart.app.functions import endpoint as endpoint_module
from rollart.app.functions.endpoint import Endpoint
from rollart.app.functions.executor import LocalExecutor
from rollart.app.functions.service import FunctionService
from rollart.gateway.functions.requests import Secret
from rollart.ports.factory import load

HEADERS = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch):
    monkeypatch.setattr(endpoint_module, "MIN_DEADLINE_S", 0.001)


class Served:
    def __init__(self, file, name, concurrency):
        self.module = load(f"{file}:correct").__globals__
        self.endpoint = Endpoint(FunctionService(LocalExecutor(f"{file}:{name}", concurrency)), Secret(SECRET))

    async def post(self, *calls, deadline_s=PATIENCE_S):
        answer = await self.endpoint.answer("POST", "/", HEADERS, request(*calls, deadline_s=deadline_s))
        return answer.status, json.loads(answer.body), answer.headers

    async def health(self):
        return (await self.endpoint.answer("GET", "/health", {}, b"")).status

    async def entered(self):
        assert await asyncio.to_thread(self.module["ENTERED"].acquire, timeout=PATIENCE_S)


def run(tmp_path, name, test, concurrency=2):
    async def whole():
        async with _served(tmp_path, name, concurrency) as served:
            await test(served)

    asyncio.run(whole())


@asynccontextmanager
async def _served(tmp_path, name, concurrency):
    served = Served(write_functions(tmp_path), name, concurrency)
    try:
        yield served
    finally:
        served.module["GATE"].set()
        await served.endpoint.service.close()


def test_values_and_parts_in_the_order_of_the_calls(tmp_path):
    async def test(served):
        status, body, headers = await served.post(call(1), call(2, transcript(2, text="43")))
        assert (status, headers["content-type"]) == (200, "application/json")
        assert [(each["key"], each["values"]) for each in body["answers"]] == [("1/reward", [1.0]), ("2/reward", [0.0])]
        assert body["cold"]
        again = (await served.post(call(3)))[1]
        assert again["instance"] == body["instance"]
        assert "cold" not in again

    run(tmp_path, "correct", test)


def test_async_functions_with_parts_and_functions_of_groups(tmp_path):
    async def judged(served):
        (answer,) = (await served.post())[1]["answers"]
        assert (answer["values"], answer["parts"]) == ([2.5], [{"clear": 0.5, "short": 2.0}])

    async def longest(served):
        (answer,) = (await served.post(call(1, transcript(1, "a"), transcript(2, "abc"))))[1]["answers"]
        assert answer["values"] == [1.0, 3.0]

    run(tmp_path, "judged", judged)
    run(tmp_path, "longest", longest)


def test_a_repeated_call_is_not_computed_again(tmp_path):
    async def test(served):
        first = (await served.post(call(1), call(1)))[1]
        second = (await served.post(call(2), call(1)))[1]
        assert first["answers"][0] == first["answers"][1] == second["answers"][1]
        assert served.module["CALLS"] == [1, 2]
        await served.post(call(1, transcript(1, answer="another prompt")))
        assert served.module["CALLS"] == [1, 2, 1], "another run may use the same key"

    run(tmp_path, "correct", test)


def test_a_call_that_comes_twice_in_a_request_is_left_once(tmp_path):
    async def test(served):
        assert (await served.post(call(1), call(1), deadline_s=0.01))[0] == 504
        await served.entered()
        assert await served.health() == 503, "no client waits for the call that holds the only slot"

    run(tmp_path, "gated", test, concurrency=1)


def test_a_call_that_runs_is_joined(tmp_path):
    async def test(served):
        first = asyncio.create_task(served.post(call(1)))
        await served.entered()
        second = asyncio.create_task(served.post(call(1)))
        await asyncio.sleep(0)
        served.module["GATE"].set()
        assert (await first)[1]["answers"] == (await second)[1]["answers"]
        assert served.module["CALLS"] == [1]

    run(tmp_path, "gated", test)


def test_more_calls_than_may_run_are_refused_with_429(tmp_path):
    async def test(served):
        tasks = [asyncio.create_task(served.post(call(number))) for number in (1, 2)]
        await served.entered()
        await served.entered()
        status, body, headers = await served.post(call(3))
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "busy", "1")
        served.module["GATE"].set()
        assert [(await task)[0] for task in tasks] == [200, 200]
        assert (await served.post(call(3)))[0] == 200

    run(tmp_path, "gated", test)


def test_a_batch_waits_for_its_own_calls(tmp_path):
    async def test(served):
        task = asyncio.create_task(served.post(*map(call, range(1, 6))))
        await served.entered()
        await served.entered()
        assert len(served.module["CALLS"]) == 2
        served.module["GATE"].set()
        assert len((await task)[1]["answers"]) == 5
        assert sorted(served.module["CALLS"]) == [1, 2, 3, 4, 5]

    run(tmp_path, "gated", test)


def test_a_thread_past_its_deadline_goes_on_and_is_remembered(tmp_path):
    async def test(served):
        task = asyncio.create_task(served.post(call(1), deadline_s=0.01))
        status, body, _ = await task
        assert (status, body["error"]["code"]) == (504, "deadline_passed")
        await served.entered()
        assert await served.health() == 503, "its slot is not free"
        again = asyncio.create_task(served.post(call(1)))
        await asyncio.sleep(0)
        assert await served.health() == 200, "somebody waits again"
        served.module["GATE"].set()
        assert (await again)[1]["answers"][0]["values"] == [1.0]
        assert served.module["CALLS"] == [1]

    run(tmp_path, "gated", test, concurrency=1)


@pytest.mark.parametrize("limit_s", [0.01, 0.0, -1.0])
def test_the_limit_of_a_platform_is_not_raised_to_the_least_deadline(tmp_path, monkeypatch, limit_s):
    monkeypatch.setattr(endpoint_module, "MIN_DEADLINE_S", PATIENCE_S)

    async def test(served):
        answer = await served.endpoint.answer("POST", "/", HEADERS, request(), limit_s=limit_s)
        assert answer.status == 504

    run(tmp_path, "endless", test, concurrency=1)


def test_an_async_call_past_its_deadline_is_stopped(tmp_path):
    async def test(served):
        for number in range(1, 4):
            assert (await served.post(call(number), deadline_s=0.01))[0] == 504
            await served.entered()
        assert await served.health() == 200

    run(tmp_path, "endless", test, concurrency=1)


def test_calls_of_a_batch_that_were_in_time_are_answered(tmp_path):
    async def test(served):
        served.module["GATE"].set()
        await served.post(call(1))
        served.module["GATE"].clear()
        status, body, _ = await served.post(call(1), call(2), deadline_s=0.01)
        assert status == 200
        done, late = body["answers"]
        assert done["values"] == [1.0]
        assert late["retry"]
        assert "did not finish" in late["error"]

    run(tmp_path, "gated", test)


@pytest.mark.parametrize(
    ("name", "retry", "text"),
    [
        ("wrong", False, "finite number"),
        ("outage", True, "OSError: the database is away \\ud800"),
        ("misspelt", False, "NameError"),
        ("leaving", True, "SystemExit"),
        ("cancelling", True, "cancelled"),
        ("many", False, "bytes"),
    ],
)
def test_a_failure_of_the_function_is_an_answer(tmp_path, name, retry, text):
    async def test(served):
        for _ in range(2):
            status, body, _ = await served.post()
            (answer,) = body["answers"]
            assert (status, answer.get("retry", False)) == (200, retry)
            assert text in answer["error"]
        calls = served.module["CALLS"]
        assert len(calls) == {"wrong": 1, "outage": 2}.get(name, len(calls)), "only what may change is tried again"

    run(tmp_path, name, test)


def test_what_cannot_be_answered_has_a_status(tmp_path):
    async def test(served):
        for headers, body, status in (({}, request(), 401), (HEADERS, b"{", 422), (HEADERS, request(), 200)):
            assert (await served.endpoint.answer("POST", "/", headers, body)).status == status
        assert (await served.endpoint.answer("PUT", "/", HEADERS, b"")).status == 405
        document = json.loads((await served.endpoint.answer("GET", "/openapi.json", {}, b"")).body)
        assert document["info"]["title"].endswith("served_rewards.py:correct")

    run(tmp_path, "correct", test)
