"""Requests of the OpenAI API: what is refused, by which name, and what is understood."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.gateway.openai.errors import ApiError
from rollart.gateway.openai.requests import MAX_CHOICES, MAX_MESSAGES, Options, parse_chat, parse_completion

HI = [{"role": "user", "content": "Hi"}]


def chat(**fields):
    return parse_chat(json.dumps({"model": "m", "messages": HI, **fields}).encode())


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def refused(parse, *body, **fields):
    with pytest.raises(ApiError) as caught:
        parse(*body, **fields)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["message"]
    return caught.value


def test_the_defaults_are_those_of_openai():
    assert chat().options == Options(
        model="m",
        max_tokens=None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=None,
        n=1,
        stop=(),
        stream=False,
        include_usage=False,
        logprobs=False,
    )
    nulls = dict.fromkeys(["max_tokens", "temperature", "n", "stop", "stream", "stream_options", "tools", "logprobs"])
    assert chat(**nulls) == chat()


def test_everything_at_once():
    asked = chat(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=-5,
        n=2,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=0,
    )
    assert asked.options == Options(
        model="m",
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=-5,
        n=2,
        stop=("a", "b"),
        stream=True,
        include_usage=True,
        logprobs=True,
    )


def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy():
    assert [chat(temperature=given).options.temperature for given in (1e-40, 9e-7, 1e-6)] == [0.0, 0.0, 1e-6]


def test_contents_are_texts_or_parts_of_text():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "Ann"},
        {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": ""},
    ]
    asked = chat(messages=messages)
    assert asked.messages == (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", ""))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 1e9}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 5}, "stop"),
        ({"stop": "x" * 129}, "stop"),
        ({"stop": ["x", 1]}, "stop[1]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 1, "logprobs": True}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": HI * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "tool", "content": "3", "tool_call_id": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls",
        ),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"tempature": 1}, "tempature"),
        ({"model": 5}, "model"),
    ],
)
def test_a_chat_that_is_refused_by_the_name_of_its_field(fields, param):
    error = refused(chat, **fields)
    assert error.param == param
    assert param in error.message or "tempature" not in fields


def test_a_missing_field_is_named():
    assert refused(parse_chat, b'{"messages": []}').param == "model"
    assert refused(parse_chat, b'{"model": "m"}').param == "messages"
    assert refused(parse_completion, b'{"model": "m"}').param == "prompt"


def test_what_asks_for_nothing_is_no_reason_to_refuse():
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "top_logprobs": 0,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    assert chat(**neutral) == chat()
    assert completion(best_of=1, echo=False, suffix="", user="me") == completion()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "temperature": NaN, "messages": []}',
        b'{"model": "m", "temperature": 1e999, "messages": []}',
        b'{"model": "m", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b', "messages": []}',
        b"\x80\x04N.",
    ],
    ids=range(10),
)
def test_a_body_that_is_not_json_is_refused(body):
    refused(parse_chat, body)
    refused(parse_completion, body)


@given(st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(str))
def test_no_body_is_an_error_of_another_kind(body):
    refused(parse_chat, body if isinstance(body, bytes) else body.encode(errors="replace"))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ("Hi",)),
        (["Hi", "Ho"], ("Hi", "Ho")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_are_texts_or_tokens(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "Hi"]}, "prompt"),
        ({"prompt": [[1], "Hi"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": ["Hi"] * 65, "n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": HI}, "messages"),
    ],
)
def test_a_completion_that_is_refused_by_the_name_of_its_field(fields, param):
    assert refused(completion, **fields).param == param


def test_logprobs_of_a_completion_are_a_number():
    assert completion(logprobs=0).options.logprobs
    assert not completion().options.logprobs
