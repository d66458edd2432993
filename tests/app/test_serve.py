"""`rollart serve` in a process of its own: the official client, many at once, bad input, and an orderly end."""

import asyncio
import re
import signal
import socket

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'rollart[serve]'")
pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'rollart[serve]'")
pytest.importorskip("openai", reason="the official client is not installed: pip install openai")

import openai
from real_cli import rollart
from served import CONTEXT, KEY, PATIENCE_S, direct, serving, tiny_checkpoint
from tokenizers import Tokenizer

from rollart.backends.environments.conversation import HfConversations

LONG = 2**18
"""A context so long that an answer of that length takes minutes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, cwd=folder.parent) as process:
        yield process


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A server whose answers take minutes, unless they are limited; it takes one at a time."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("endless") / "tiny", endless=True, max_position_embeddings=LONG)
    options = ("--slots", "1", "--queue", "1", "--max-context", str(LONG), "--kv-mib", "16", "--grace-s", "1")
    with serving(folder, *options, cwd=folder.parent) as process:
        yield process


def client(process, kind=openai.OpenAI, **options):
    return kind(base_url=process.url, **{"api_key": KEY, "max_retries": 0, "timeout": PATIENCE_S, **options})


def asked(text, **options):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 40, **options}


def expected(folder, text, **sampling):
    """What the engine itself samples, and its text."""
    conversations = HfConversations(folder)
    sampling = {"max_tokens": 40, "temperature": 0.0, "stop_tokens": conversations.stop_tokens, **sampling}
    prompt = conversations.render([("user", text)])
    (done,) = direct(folder, [prompt], **sampling)
    return prompt, done, conversations.text(done.generated.tokens.ids().tolist())


# --- the official client --------------------------------------------------------------------------------------------


def test_a_greedy_answer_is_that_of_the_engine(server, folder):
    prompt, done, text = expected(folder, "what is left?")
    answer = client(server).chat.completions.create(**asked("what is left?", temperature=0, logprobs=True))
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (text, done.finish.value)
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == done.generated.tokens.length
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == len(prompt) + done.generated.tokens.length
    assert answer.model == "tiny"


def test_a_stream_is_the_same_answer_in_pieces(server, folder):
    _, done, text = expected(folder, "a bird sings")
    usage = {"include_usage": True}
    stream = client(server).chat.completions.create(
        **asked("a bird sings", temperature=0, stream=True, stream_options=usage)
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == done.finish.value
    assert {chunk.usage for chunk in chunks} == {None}
    assert last.usage.completion_tokens == done.generated.tokens.length


def test_a_seed_repeats_an_answer_and_choices_differ(server):
    options = asked("what sits there?", seed=11, n=3)
    first, second = (client(server).chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3


def test_a_longer_conversation_computes_only_what_is_new(server):
    ask = client(server).chat.completions.create
    messages = [{"role": "user", "content": "what is left of the tree and what sits there?"}]
    first = ask(model="tiny", messages=messages, temperature=0, max_tokens=8)
    messages += [first.choices[0].message, {"role": "user", "content": "and what sings?"}]
    later = ask(model="tiny", messages=messages, max_tokens=4)
    assert later.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_a_completion_continues_a_text(server, folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = HfConversations(folder).stop_tokens
    ids = tokenizer.encode("the tree").ids
    (done,) = direct(folder, [ids], max_tokens=12, temperature=0.0, stop_tokens=ends)
    for prompt in ("the tree", ids):
        answer = client(server).completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=12)
        assert answer.choices[0].text == tokenizer.decode(done.generated.tokens.ids().tolist())
        assert answer.usage.prompt_tokens == len(ids)


def test_32_requests_at_once_have_the_answers_of_each_alone(server, folder):
    texts = [f"what is {'left ' * number}" for number in range(32)]
    conversations = HfConversations(folder)
    prompts = [conversations.render([("user", text)]) for text in texts]
    alone = direct(folder, prompts, max_tokens=40, temperature=0.0, stop_tokens=conversations.stop_tokens)

    async def one(ask, number):
        if number % 2:
            answer = await ask(**asked(texts[number], temperature=0))
            return answer.choices[0].message.content
        stream = await ask(**asked(texts[number], temperature=0, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everything():
        async with client(server, openai.AsyncOpenAI) as ours:
            return await asyncio.gather(*(one(ours.chat.completions.create, number) for number in range(32)))

    found = asyncio.run(everything())
    assert found == [conversations.text(done.generated.tokens.ids().tolist()) for done in alone]


def test_models_and_errors_as_the_client_knows_them(server):
    ours = client(server)
    assert [model.id for model in ours.models.list()] == ["tiny"] == [ours.models.retrieve("tiny").id]
    with pytest.raises(openai.AuthenticationError):
        client(server, api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ours.chat.completions.create(**{**asked("x"), "model": "gpt"})
    with pytest.raises(openai.BadRequestError) as caught:
        ours.chat.completions.create(**asked("x", n=10**9))
    assert caught.value.param == "n"
    with pytest.raises(openai.BadRequestError) as caught:
        ours.chat.completions.create(**asked("left " * CONTEXT))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ours.chat.completions.create(**asked("x", response_format={"type": "json_object"}))


# --- the wire -------------------------------------------------------------------------------------------------------


def talk(process, data):
    """Send bytes, and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", process.port), timeout=PATIENCE_S) as link:
        link.sendall(data)
        out = b""
        while part := link.recv(65536):
            out += part
    return out


def head(path, *, key=KEY, length=0, fields=()):
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *fields, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("/v1/chat/completions", key="wrong"), 401),
        (head("/v1/chat/completions", key="\xff\xfe"), 401),
        (head("/%ff", key="wrong"), 401),
        (head("/v1/chat/completions", length=10**12), 413),
        (head("/v1/chat/completions", length=4) + b"\xff\xfe\x00\x01", 400),
        (head("/v1/chat/completions", length=5) + b"\x80\x04N.\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
def test_bytes_that_are_no_request_get_an_error_and_nothing_else_happens(server, data, status):
    assert talk(server, data).startswith(f"HTTP/1.1 {status} ".encode())
    assert client(server).chat.completions.create(**asked("still there?")).choices


def test_headers_without_end_are_refused(server):
    try:
        answer = talk(server, head("/v1/chat/completions", fields=["X: " + "x" * 200_000]))
    except ConnectionResetError:  # the answer is lost if the server closes before it has read all
        answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 400 ")
    assert client(server).models.list().data


def test_the_key_appears_nowhere(server):
    with pytest.raises(openai.AuthenticationError):
        client(server, api_key="another-secret").models.list()
    assert KEY not in server.said
    assert "another-secret" not in server.said
    assert "Traceback" not in server.said


# --- leaving, and the end -------------------------------------------------------------------------------------------


def forever(**options):
    return asked("go on", max_tokens=LONG - 100, stream=True, **options)


def test_a_client_that_leaves_frees_its_place(endless):
    # Where the place is not free yet, the client tries again by itself.
    ours = client(endless, max_retries=50)
    for _ in range(3):
        with ours.chat.completions.create(**forever()) as stream:
            assert next(stream).choices
    # It is the only place: an answer that went on would keep this one waiting for minutes.
    assert ours.chat.completions.create(**asked("and now?", max_tokens=3)).usage.completion_tokens <= 3


def test_more_than_the_queue_takes_is_refused_until_there_is_room(endless):
    ours = client(endless)
    with ours.chat.completions.create(**forever()) as running, ours.chat.completions.create(**forever()) as waiting:
        next(running)
        next(waiting)
        with pytest.raises(openai.RateLimitError) as caught:
            ours.chat.completions.create(**asked("me too"))
        assert caught.value.response.headers["retry-after"] == "1"
    assert client(endless, max_retries=50).chat.completions.create(**asked("and now?", max_tokens=3)).choices


def test_sigterm_lets_requests_in_flight_finish(folder):
    with serving(folder, cwd=folder.parent) as process:
        stream = client(process).chat.completions.create(**asked("go on", max_tokens=450, stream=True, seed=3))
        next(stream)
        process.signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
        assert process.ends() == 0
        assert "Traceback" not in process.said


def test_a_second_signal_waits_for_nothing(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", endless=True, max_position_embeddings=LONG)
    with serving(folder, "--max-context", str(LONG), "--grace-s", "100000", cwd=tmp_path) as process:
        stream = client(process).chat.completions.create(**forever())
        next(stream)
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGINT)
        with pytest.raises(openai.OpenAIError):
            list(stream)
        assert process.ends() == 0


def test_sigterm_waits_for_requests_in_flight_no_longer_than_its_deadline(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", endless=True, max_position_embeddings=LONG)
    options = ("--max-context", str(LONG), "--kv-mib", "16", "--grace-s", "1")
    with serving(folder, *options, cwd=tmp_path) as process:
        stream = client(process).chat.completions.create(**forever())
        next(stream)
        process.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert process.ends() == 0
        assert "Traceback" not in process.said


# --- the command ----------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_start(folder):
    done = rollart("serve", "tiny", "--device", "nonsense", "--port", "0", cwd=folder.parent)
    assert done.code == 1
    assert "WorkerLost: the engine could not be started" in done.err


def test_without_a_key_one_is_made_and_shown_once(folder):
    with serving(folder, "--name", "mine", cwd=folder.parent, key="") as process:
        (key,) = re.findall(r"the key of this server, until it stops, is (\S+)", process.said)
        assert len(key) >= 40
        assert [model.id for model in client(process, api_key=key).models.list()] == ["mine"]
        with pytest.raises(openai.AuthenticationError):
            client(process).models.list()
        assert process.said.count(key) == 1


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["nowhere"], KEY, "nowhere is not a folder"),
        (["tiny", "--slots", "0"], KEY, "--slots 0: input should be greater than or equal to 1"),
        (["tiny", "--dtype", "int8"], KEY, "--dtype int8: input should be 'float32' or 'bfloat16'"),
        (["tiny", "--base", "tiny"], KEY, "omit it"),
        (["tiny", "--host", "192.0.2.1"], KEY, "choose another"),
        (["tiny"], "a key", "ROLLART_API_KEY has characters"),
    ],
)
def test_what_the_command_refuses(folder, words, key, message):
    done = rollart("serve", *words, "--port", "0", cwd=folder.parent, ROLLART_API_KEY=key)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
