"""The endpoint as a client sees it, with an engine that does what the test says: key, limits, errors, streams."""

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'rollart[serve]'")

from scripted import CONTEXT, KEY, Call, Script, chat, engine, post, served

from rollart.app.serving.http import MAX_BODY_BYTES, application
from rollart.types.messages import Abort, Add, FinishReason, Refused

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
    ("GET", "/health/../v1/models"),
    ("OPTIONS", "/v1/models"),
]


def run(test, *, body_timeout_s=100.0, **options):
    script = Script()

    async def whole():
        serving = engine(script, **options)
        try:
            await serving.start()
            await test(application(served(), serving, KEY, body_timeout_s=body_timeout_s), script)
        finally:
            await serving.close()

    asyncio.run(whole())


def events(stream):
    """Chunks of a stream; the last line is its end."""
    lines = stream.decode().strip().split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def problem(body):
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- the key --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_key_before_a_byte_is_read(method, path):
    async def test(app, script):
        wrong = ["", "x", KEY[:-1], KEY + "x", KEY.upper(), "é"]
        for key in wrong:
            call = Call(app, method, path, key=key)
            call.send(b"{")
            status, headers, body = await call.answer()
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert problem(body)["code"] == "invalid_api_key"
            assert KEY not in body.decode()
            assert call.read == 0
        for fields in (
            [("Authorization", KEY)],
            [("Authorization", f"Basic {KEY}")],
            [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer x")],
        ):
            assert (await Call(app, method, path, key="", headers=fields).start())[0] == 401
        assert not script.commands

    run(test)


def test_health_needs_no_key_and_tells_when_the_engine_is_gone():
    async def test(app, script):
        status, _, body = await Call(app, "GET", "/health", key="").answer()
        assert (status, json.loads(body)) == (200, {"status": "ok"})
        call = chat(app)
        await script.sent(Add)
        script.die(OSError("gone"))
        status, _, body = await call.answer()
        assert (status, problem(body)["type"]) == (503, "server_error")
        assert "gone" not in body.decode(), "details are for the log"
        assert (await Call(app, "GET", "/health", key="").start())[0] == 503
        assert (await chat(app).start())[0] == 503

    run(test)


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_whole_answer():
    async def test(app, script):
        call = chat(app, logprobs=True, temperature=0.5, seed=3, n=2, max_tokens=None)
        first, second = await script.sent(Add, 2)
        assert bytes(first.new.ids()[2:-1].astype("u1")) == b"Hi"
        assert (first.sampling.temperature, first.sampling.seed, second.sampling.seed) == (0.5, 3, 4)
        assert first.sampling.max_tokens == CONTEXT - first.new.length
        assert first.sampling.stop_tokens == (256,)
        script.progress(first.request, "Hel")
        script.done(second.request, "no", FinishReason.LENGTH, cached=4)
        script.done(first.request, "lo", cached=3)
        status, headers, body = await call.answer()
        assert (status, headers["content-type"]) == (200, "application/json")
        answer = json.loads(body)
        texts = [(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]
        assert texts == [("Hello", "stop"), ("no", "length")]
        assert [each["token"] for each in answer["choices"][0]["logprobs"]["content"]] == list("Hello")
        assert answer["usage"]["prompt_tokens"] == first.new.length, "counted once for all choices"
        assert answer["usage"]["completion_tokens"] == 7
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}

    run(test)


def test_a_stream_has_text_as_it_comes_and_ends_with_usage_and_done():
    async def test(app, script):
        call = chat(app, stream=True, stream_options={"include_usage": True})
        status, headers = await call.start()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        begin, _ = await call.part()
        assert json.loads(begin[6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        (add,) = await script.sent(Add)
        script.progress(add.request, "Hé")
        chunk, more = await call.part()
        assert json.loads(chunk[6:])["choices"][0]["delta"] == {"content": "Hé"}
        assert more
        script.done(add.request, "llo")
        last, usage = events(await call.body())
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({"content": "llo"}, "stop")
        assert usage["usage"]["completion_tokens"] == 6

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_exactly_and_aborts_the_turn(stream):
    async def test(app, script):
        call = chat(app, stop=["END", "X"], stream=stream, stream_options={"include_usage": True} if stream else None)
        (add,) = await script.sent(Add)
        script.progress(add.request, "a E")
        script.progress(add.request, "NDed and more")
        (abort,) = await script.sent(Abort)
        script.done(abort.request, "even more", FinishReason.ABORTED)
        _, _, body = await call.answer()
        if stream:
            *chunks, last, usage = events(body)
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in [*chunks, last])
            finish, used = last["choices"][0]["finish_reason"], usage["usage"]
        else:
            answer = json.loads(body)
            text, finish = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
            used = answer["usage"]
        assert (text, finish) == ("a ", "stop")
        assert used["completion_tokens"] == len("a END")

    run(test)


def test_completions_of_several_prompts():
    async def test(app, script):
        call = post(app, "/v1/completions", {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 5, "logprobs": 0})
        first, second = await script.sent(Add, 2)
        assert (first.new.ids().tolist(), second.new.ids().tolist()) == ([1, 2], [3])
        script.done(second.request, "b")
        script.done(first.request, "a")
        answer = json.loads((await call.answer())[2])
        assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "a"), (1, "b")]
        assert answer["choices"][1]["logprobs"]["token_logprobs"] == [-1.0]
        assert answer["usage"]["prompt_tokens"] == 3

    run(test)


def test_models():
    async def test(app, script):  # noqa: ARG001
        listed = json.loads((await Call(app, "GET", "/v1/models").answer())[2])
        assert [each["id"] for each in listed["data"]] == ["tiny"]
        assert json.loads((await Call(app, "GET", "/v1/models/tiny").answer())[2]) == listed["data"][0]
        status, _, body = await Call(app, "GET", "/v1/models/other/one").answer()
        assert (status, problem(body)["code"]) == (404, "model_not_found")

    run(test)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/chat/completions", b"\xff\xfe", 400, "JSON"),
        ("/v1/chat/completions", b"", 400, "JSON"),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "x" * 64}]},
            400,
            "context",
        ),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "system", "content": "x"}]}, 400, "in turns"),
        ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}, 404, "`other`"),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 10**9},
            400,
            "n must be",
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 5},
            400,
            "queues 3 answers",
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 64},
            400,
            "and 64 more",
        ),
        ("/v1/completions", {"model": "tiny", "prompt": "x"}, 400, "no tokenizer"),
        ("/v1/completions", {"model": "tiny", "prompt": [260]}, 400, "vocabulary"),
        ("/v1/completions", {"model": "tiny", "prompt": [[]]}, 400, "empty"),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}, 404, "Not Found"),
    ],
)
def test_bad_requests_leave_the_engine_alone(path, body, status, word):
    async def test(app, script):
        found, _, answer = await post(app, path, body).answer()
        assert found == status, answer
        assert word in problem(answer)["message"]
        call = chat(app)
        (add,) = await script.sent(Add)
        script.done(add.request, "still here")
        assert b"still here" in (await call.answer())[2]

    run(test)


def test_a_wrong_method():
    async def test(app, script):  # noqa: ARG001
        status, headers, body = await Call(app, "GET", "/v1/chat/completions").answer()
        assert (status, headers["allow"]) == (405, "POST")
        assert problem(body)["message"] == "Method Not Allowed."

    run(test)


def test_a_body_that_is_too_large_is_not_read_to_its_end():
    async def test(app, script):  # noqa: ARG001
        announced = Call(app, "POST", "/v1/completions", headers=[("Content-Length", str(MAX_BODY_BYTES + 1))])
        assert (await announced.start())[0] == 413
        assert announced.read == 0
        nonsense = Call(app, "POST", "/v1/completions", headers=[("Content-Length", "-1")])
        assert (await nonsense.start())[0] == 413
        endless = Call(app, "POST", "/v1/completions")
        for _ in range(6):
            endless.send(b"x" * (MAX_BODY_BYTES // 4), more=True)
        status, headers, body = await endless.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert "larger than" in problem(body)["message"]
        assert endless.read == 5

    run(test)


def test_a_body_that_does_not_come():
    async def test(app, script):  # noqa: ARG001
        call = Call(app, "POST", "/v1/chat/completions")
        call.send(b'{"model":', more=True)
        status, headers, body = await call.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert "within" in problem(body)["message"]

    run(test, body_timeout_s=0.05)


def test_requests_beyond_the_queue_get_429_and_a_time():
    async def test(app, script):
        calls = [chat(app) for _ in range(3)]
        adds = await script.sent(Add, 3)
        status, headers, body = await chat(app).answer()
        assert (status, headers["retry-after"]) == (429, "1")
        assert problem(body)["code"] == "rate_limit_exceeded"
        script.done(adds[0].request, "a")
        assert (await calls[0].answer())[0] == 200
        assert (await chat(app, n=2).answer())[0] == 429, "there is room for one only"
        again = chat(app)
        await script.sent(Add, 4)
        for number, call in enumerate([*calls[1:], again], start=1):
            script.done(script.commands[number].request, "b")
            assert (await call.answer())[0] == 200

    run(test)


def test_a_refusal_by_the_engine():
    async def test(app, script):
        whole, stream = chat(app), chat(app, stream=True)
        adds = await script.sent(Add, 2)
        for add in adds:
            script.report(Refused(add.request, "a reason of its own"))
        status, _, body = await whole.answer()
        assert (status, "a reason of its own" in problem(body)["message"]) == (400, True)
        assert (await stream.start())[0] == 200
        body = await stream.body()
        last = body.decode().strip().split("\n\n")[-1]
        assert "a reason of its own" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert b"[DONE]" not in body

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_turns(stream):
    async def test(app, script):
        call = chat(app, stream=stream, n=2)
        adds = await script.sent(Add, 2)
        script.progress(adds[0].request, "a")
        call.leave()
        aborts = await script.sent(Abort, 2)
        assert [abort.request for abort in aborts] == [add.request for add in adds]
        async with asyncio.timeout(100):
            await call.task

    run(test)


def test_a_client_that_leaves_within_its_body_starts_nothing():
    async def test(app, script):
        call = Call(app, "POST", "/v1/chat/completions")
        call.send(b"{", more=True)
        call.leave()
        async with asyncio.timeout(100):
            await call.task
        assert not script.commands

    run(test)


def test_a_cancelled_request_aborts_its_turn():
    async def test(app, script):
        call = chat(app, stream=True)
        (add,) = await script.sent(Add)
        call.task.cancel()
        assert await script.sent(Abort) == [Abort(add.request)]

    run(test)
