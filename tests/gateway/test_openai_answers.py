"""Answers of the OpenAI API: whole and in chunks, as the official client reads them."""

import json

import pytest

from rollart.gateway.openai.answers import ChatAnswer, Piece, TextAnswer, TokenLogprob, Usage, event, model, models
from rollart.gateway.openai.errors import busy, unauthorised

HEAD = {"id": "x-1", "created_s": 5, "model": "m"}
PIECES = [
    Piece("Hel", [TokenLogprob("Hel", -0.5, [72, 101, 108])]),
    Piece("lo", [TokenLogprob("lo", -1.5, None)], "stop"),
]
USAGE = Usage.of(3, 2, 1)


def answer(kind, **options):
    return kind(**HEAD, **{"logprobs": False, "include_usage": False, **options})


def test_a_whole_chat():
    found = json.loads(answer(ChatAnswer, logprobs=True).whole([PIECES], USAGE))
    assert found == {
        "id": "x-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": {
                    "content": [
                        {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": []},
                        {"token": "lo", "logprob": -1.5, "bytes": None, "top_logprobs": []},
                    ],
                    "refusal": None,
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_chunks_of_a_chat():
    words = answer(ChatAnswer)
    begin, first, last = (json.loads(chunk) for chunk in (words.begin(1), *(words.chunk(1, each) for each in PIECES)))
    assert begin["choices"] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert first["choices"][0]["delta"] == {"content": "Hel"}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({"content": "lo"}, "stop")
    assert {each["object"] for each in (begin, first, last)} == {"chat.completion.chunk"}
    assert "usage" not in last


def test_a_stream_with_usage_has_null_in_all_chunks_but_the_last():
    words = answer(ChatAnswer, include_usage=True)
    assert json.loads(words.begin(0))["usage"] is None
    last = json.loads(words.usage(USAGE))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_a_completion():
    words = answer(TextAnswer, logprobs=True)
    assert words.begin(0) is None
    (choice,) = json.loads(words.whole([PIECES], USAGE))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    assert choice["logprobs"] == {"tokens": ["Hel", "lo"], "token_logprobs": [-0.5, -1.5], "top_logprobs": None}
    assert json.loads(words.chunk(0, PIECES[0]))["choices"][0]["text"] == "Hel"


def test_the_official_client_reads_them():
    types = pytest.importorskip("openai.types", reason="the openai client is not installed: pip install openai")
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    whole = ChatCompletion.model_validate_json(answer(ChatAnswer, logprobs=True).whole([PIECES], USAGE))
    assert whole.choices[0].message.content == "Hello"
    ChatCompletionChunk.model_validate_json(answer(ChatAnswer).chunk(0, PIECES[1]))
    types.Completion.model_validate_json(answer(TextAnswer, logprobs=True).whole([PIECES], USAGE))
    assert types.Model.model_validate_json(model("m", 5)).id == json.loads(models("m", 5))["data"][0]["id"]


def test_errors():
    assert json.loads(unauthorised().body())["error"]["code"] == "invalid_api_key"
    assert busy(3).headers == {"Retry-After": "3"}
    assert json.loads(busy(3).body())["error"]["type"] == "rate_limit_error"
    assert event(b"x") == b"data: x\n\n"
