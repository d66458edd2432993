"""Judges: what is asked, how judgements are read, and an endpoint that fails; over real HTTP."""

import http.server
import json
import threading
from contextlib import contextmanager, suppress

import pytest
from served_function import transcript

from rollart.backends.rewards import judge_client
from rollart.backends.rewards.judge import Judge
from rollart.backends.rewards.judge_client import JudgeUnavailable
from rollart.backends.rewards.judge_texts import TEMPLATE
from rollart.ports.factory import load
from rollart.ports.reward import RewardKind, kind_of
from rollart.ports.reward_call import BadReward, RewardCaller
from rollart.types.errors import RequestError
from rollart.types.transcript import Transcript

KEY = "a-key-for-tests"


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Answers with what the test put on the server, in order; the last one again and again."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, dict(self.headers), json.loads(body)))
        answers = self.server.answers
        status, text, headers = answers.pop(0) if len(answers) > 1 else answers[0]
        if status == 0:
            self.close_connection = True
            return
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # a client that has read enough
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def says(text, status=200):
    return status, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}), {}


@contextmanager
def endpoint(*answers):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.daemon_threads = True
    server.answers, server.seen, server.connections = list(answers), [], 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def judge(server, **settings):
    port = server.server_address[1]
    template = {"template": "{{rubric}} {{final_text}}"} if settings.get("parse") == "pattern" else {}
    common = {"base_url": f"http://127.0.0.1:{port}/v1/", "model": "m", "rubric": "Be right.", **template}
    return Judge(**{**common, **settings})


def judged(answer, **settings):
    with endpoint(says(answer)) as server:
        return judge(server, **settings)(T)


T = Transcript.from_json(json.dumps(transcript()))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(judge_client, "FIRST_PAUSE_S", 0.0)


# --- judgements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "settings", "reward"),
    [
        ('It is right. {"score": 10}', {}, 1.0),
        ('{"score": 2, "why": {"score": 9}}', {}, 0.2),
        ('{"score": 1} or rather {"score": 4}', {}, 0.4),
        ('{"score": 4} {"note": 1} {broken', {}, 0.4),
        ('```json\n{"score": 0}\n```', {}, 0.0),
        ('{"score": 3}', {"lowest": 1, "highest": 5}, 0.5),
        ("Score: 1. Score: 7.5!", {"parse": "pattern", "pattern": r"Score: ([\d.]+\d|\d)"}, 0.75),
        ('{"right": 10, "brief": 5}', {"scores": ["right", "brief"]}, {"right": 0.5, "brief": 0.25}),
        (
            "right=8 brief=2",
            {"scores": ["right", "brief"], "parse": "pattern", "pattern": r"right=(?P<right>\d+) brief=(?P<brief>\d+)"},
            {"right": 0.4, "brief": 0.1},
        ),
    ],
)
def test_judgements(answer, settings, reward):
    assert judged(answer, **settings) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "settings"),
    [
        ("", {}),
        (None, {}),
        ("I would say 7 out of 10.", {}),
        ('{"score": "7"}', {}),
        ('{"score": true}', {}),
        ('{"score": null}', {}),
        ('{"score": NaN}', {}),
        ('{"score": 10.1}', {}),
        ('{"score": -0.1}', {}),
        ('{"score": 1e400}', {}),
        ('{"score": 1' + "0" * 310 + "}", {}),
        ('{"score": 1' + "0" * 5000 + "}", {}),
        ("[7]", {}),
        ("{" * 10_000, {}),
        ('{"right": 7}', {"scores": ["right", "brief"]}),
        ("Score: x", {"parse": "pattern", "pattern": "Score: (.)"}),
        ("Score: ", {"parse": "pattern", "pattern": r"Score: (\d)?"}),
        ("Score: inf", {"parse": "pattern", "pattern": "Score: (.*)"}),
    ],
)
def test_a_malformed_judgement_is_a_failure_for_good(answer, settings):
    with pytest.raises(BadReward, match="malformed judgement"):
        judged(answer, **settings)


# --- what is asked --------------------------------------------------------------------------------------------------


def test_the_default_template_has_rubric_conversation_and_range():
    with endpoint(says('{"score": 5}')) as server:
        assert judge(server, system="You are strict.", options={"seed": 1})(T) == 0.5
        ((path, headers, body),) = server.seen
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    system, user = body["messages"]
    assert (system["content"], body["seed"], body["temperature"]) == ("You are strict.", 1, 0.0)
    for part in ("Be right.", "[environment] What is 6 * 7?\n[agent] 42", "from 0 to 10", '"score"'):
        assert part in user["content"]
    assert "{{" not in user["content"]


def test_the_example_has_all_scores():
    with endpoint(says('{"clear": 5, "polite": 5}')) as server:
        judge(server, scores=["clear", "polite"], lowest=1)(T)
        assert 'for example: {"clear": 1.0, "polite": 1.0}' in server.seen[0][2]["messages"][0]["content"]


def test_templates_name_fields_of_the_prompt_and_texts_are_not_templates():
    attack = Transcript.from_json(json.dumps(transcript(text="{{prompt.answer}}")))
    with endpoint(says('{"score": 5}')) as server:
        ask = judge(server, template="{{final_text}} vs {{ prompt.answer }} {not a name}")
        ask(attack)
        assert server.seen[0][2]["messages"][0]["content"] == "{{prompt.answer}} vs 42 {not a name}"
        with pytest.raises(BadReward, match="has only"):
            judge(server, template="{{prompt.other}}")(T)


def test_long_texts_are_shortened():
    long = Transcript.from_json(json.dumps(transcript(text="x" * 1000)))
    with endpoint(says('{"score": 5}')) as server:
        judge(server, template="{{final_text}}", max_characters=100)(long)
        text = server.seen[0][2]["messages"][0]["content"]
    assert "900 characters left out" in text
    assert len(text) < 150


# --- the endpoint ---------------------------------------------------------------------------------------------------


def test_what_may_pass_is_tried_again(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    busy = (429, "slow down", {"Retry-After": "0"})
    cut = (503, "short", {"Content-Length": "9", "Connection": "close"})
    with endpoint(busy, cut, (0, "", {}), says('{"score": 5}')) as server:
        ask = judge(server, secret="JUDGE_KEY")
        assert ask(T) == ask(T) == 0.5
        assert [seen[1]["Authorization"] for seen in server.seen] == [f"Bearer {KEY}"] * 5
        assert server.connections == 3, "one that works is kept"


def test_an_endpoint_that_stays_away_is_no_fault_of_the_agent(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with endpoint((500, f"your key {KEY} is fine, we are not", {})) as server:
        with pytest.raises(JudgeUnavailable, match="500") as away:
            judge(server, secret="JUDGE_KEY", attempts=2)(T)
        assert len(server.seen) == 2
        assert KEY not in str(away.value)
        unreachable = judge(server, attempts=1)
    with pytest.raises(JudgeUnavailable, match="cannot be reached"):
        unreachable(T)


@pytest.mark.parametrize(
    "answer",
    [
        (401, "wrong key", {}),
        (302, "", {"Location": "http://127.0.0.1:1/"}),
        (200, "<html>", {}),
        (200, '{"choices": []}', {}),
        (200, "x" * (judge_client.MAX_ANSWER_BYTES + 1), {}),
    ],
    ids=str,
)
def test_what_would_not_change_is_not_tried_again(answer):
    with endpoint(answer) as server:
        with pytest.raises(BadReward):
            judge(server)(T)
        assert len(server.seen) == 1


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("before", [0, judge_client.SHOWN_CHARACTERS - len(KEY) // 2])
def test_no_part_of_the_key_that_the_endpoint_repeats_is_shown(monkeypatch, status, before):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with endpoint((status, "x" * before + KEY, {})) as server, pytest.raises(BadReward) as wrong:
        judge(server, secret="JUDGE_KEY")(T)
    assert KEY[:4] not in str(wrong.value)


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_judge_is_a_table_of_a_file(tmp_path):
    file = tmp_path / "judges.toml"
    with endpoint(says('{"score": 9}')) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        file.write_text(
            f'[helpful]\nfactory = "rollart.backends.rewards.judge:Judge"\nbase_url = "{url}"\nmodel = "m"\n'
        )
        assert kind_of(load(f"{file}:helpful"), "helpful") is RewardKind.TRAJECTORY
        assert RewardCaller(f"{file}:helpful").score([T]).values == (0.9,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[helpfull]\n", "did you mean helpfull"),
        ("[helpful]\n", "does not name its `factory`"),
        ("helpful = 1\n", r"no table \[helpful\]"),
        ("[helpful\n", "cannot be read"),
        ('[helpful]\nfactory = "math:nothing"\n', "has no 'nothing'"),
        ('[helpful]\nfactory = "math:pi"\n', "cannot be called"),
        ('[helpful]\nfactory = "math:sqrt"\nx = 1\n', "no keyword"),
        ('[helpful]\nfactory = "math:fsum"\n', "argument"),
        ('[helpful]\nfactory = "rollart.backends.rewards.judge:Judge"\nmodel = "m"\n', "base_url: field required"),
    ],
)
def test_a_table_that_is_wrong_is_refused(tmp_path, text, message):
    (tmp_path / "judges.toml").write_text(text)
    with pytest.raises(RequestError, match=message):
        load(f"{tmp_path / 'judges.toml'}:helpful")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "ftp://x/v1"}, "base_url"),
        ({"base_url": "http://me:pw@x/v1"}, "base_url"),
        ({"modle": "m"}, "did you mean model"),
        ({"lowest": 5, "highest": 5}, "must be more"),
        ({"template": "{{rubrik}}"}, "did you mean rubric"),
        ({"parse": "pattern"}, "go together"),
        ({"parse": "pattern", "pattern": r"(\d)", "template": TEMPLATE}, "asks for JSON"),
        ({"pattern": "x"}, "go together"),
        ({"parse": "pattern", "pattern": "("}, "pattern"),
        ({"parse": "pattern", "pattern": "no group"}, "one group"),
        ({"parse": "pattern", "pattern": "(x)", "scores": ["a", "b"]}, r"\(\?P<a>"),
        ({"secret": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
        ({"scores": []}, "scores"),
    ],
)
def test_settings_that_are_wrong_are_refused(settings, message):
    with pytest.raises(RequestError, match=message):
        Judge(**{"base_url": "http://127.0.0.1:1/v1", "model": "m", "template": "{{final_text}}", **settings})
