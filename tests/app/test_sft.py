"""`rollart sft`: from demonstrations to a model that a run starts from."""

import json
from pathlib import Path
from typing import Any

import parrot
import pytest
from real_cli import rollart

import rollart as api
from rollart.app.api import merged
from rollart.app.demonstrations import read_demonstrations, rendered, teaching_codec
from rollart.app.transcript_store import read_transcripts
from rollart.backends.environments.codec import ByteCodec
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.errors import ConfigError, Interrupted, RequestError

PLAYER = f"{parrot.__file__}:player"
FAST = {"model": {"config": {**parrot.CONFIG["model"]["config"], "hidden_size": 16, "num_hidden_layers": 1}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sft(**changes: Any) -> api.SftResult:
    given = {"demonstrations": parrot.player} | {
        key: changes.pop(key) for key in ("demonstrations", "out") if key in changes
    }
    return api.sft(parrot.CONFIG, **given, **changes)  # type: ignore[arg-type]


def config(**changes: Any) -> RunConfig:
    return check(RunConfig, merged(parrot.CONFIG, changes))


def weights(result: api.SftResult) -> bytes:
    return (result.model / "model.safetensors").read_bytes()


def lines(result: api.SftResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


# --- the whole way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_a_run_starts_where_the_demonstrations_led(folder: Path, lora: dict[str, int] | None) -> None:
    start: dict[str, Any] = {}
    if lora:
        start = {"model": str(sft(sft={"steps": 40}, out="base").model)}
    result = sft(demonstrations={"parrot": parrot.clumsy}, out="sft", trainer={"lora": lora}, **start)
    assert result.held_out is not None
    assert result.held_out < 1.5, "0.7 is the best of a coin's throw, 5.6 a random guess"
    assert [line["step"] for line in lines(result)] == list(range(1, 61))
    run = api.run(
        parrot.CONFIG, out="run", model=str(result.model), steps=4, trainer={"lora": lora, "learning_rate": 1e-4}
    )
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["rewards"]["parrot"] > 0.1, "random weights earn nothing"
    assert len(steps) == run.report.steps == 4
    assert any(step["metrics"]["grad_norm"] > 0 for step in steps), "there is something to reinforce"


def test_the_command_does_the_same(folder: Path) -> None:
    toml = parrot_toml(folder)
    done = rollart("sft", toml, "--demonstrations", PLAYER, "--set", "sft.steps=3", "--out", "a", "--json", cwd=folder)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["steps"], result["demonstrations"], result["model"]) == (3, 40, "a/model")
    assert "step 3/3: loss" in done.err
    again = rollart("sft", toml, "--demonstrations", PLAYER, "--set", "sft.steps=3", "--out", "b", cwd=folder)
    assert "rollart train" in again.err
    assert (folder / "a/model/model.safetensors").read_bytes() == (folder / "b/model/model.safetensors").read_bytes()
    assert rollart("sft", "--resume", "a", cwd=folder).code == 2
    assert rollart("sft", toml, cwd=folder).err.startswith("rollart: give the demonstrations")


def parrot_toml(folder: Path) -> str:
    (folder / "parrot.toml").write_text(
        f"""
name = "parrot"
[tasks.parrot]
environment = "{parrot.__file__}:Parrot"
max_turn_tokens = 4
[pools.local]
[sft]
episodes = 40
[model.config]
model_type = "qwen3"
vocab_size = 260
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
"""
    )
    return "parrot.toml"


# --- determinism, resume --------------------------------------------------------------------------------------------


def test_an_interrupted_training_goes_on_as_if_it_had_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollart.backends.trainers import supervised

    whole = sft(**FAST, sft={"steps": 9, "checkpoint_every": 2}, out="whole")
    real = supervised._step

    def interrupted(trainer: Any, step: int, chosen: Any) -> float:
        if step == 6:
            raise KeyboardInterrupt
        return real(trainer, step, chosen)

    monkeypatch.setattr(supervised, "_step", interrupted)
    with pytest.raises(Interrupted, match="rollart sft --resume cut"):
        sft(**FAST, sft={"steps": 9, "checkpoint_every": 2}, out="cut")
    assert not Path("cut/model").exists()
    monkeypatch.setattr(supervised, "_step", real)
    resumed = api.sft(resume="cut")
    assert weights(resumed) == weights(whole)
    assert [line["step"] for line in lines(resumed)] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    with pytest.raises(RequestError, match="is finished"):
        api.sft(resume="cut")


def test_ranks_that_the_run_would_choose_are_one_here() -> None:
    result = sft(demonstrations={"parrot": parrot.clumsy}, **FAST, trainer={"ranks": "auto"}, sft={"steps": 1})
    assert result.steps == 1


def said_something(t: api.Transcript) -> float:
    return float(bool(t.final_text))


def test_a_player_of_rows_given_from_python_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollart.backends.trainers import supervised

    real = supervised._step

    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    task = api.Task(prompts=[{"question": f"say {letter}"} for letter in "abcdefgh"], reward=said_something)
    given = {"model": FAST["model"], "sft": {"episodes": 4, "steps": 2}, "tasks": {"rows": task}}
    monkeypatch.setattr(supervised, "_step", interrupted)
    with pytest.raises(Interrupted):
        api.sft(demonstrations=parrot.player, out="cut", **given)  # type: ignore[arg-type]
    monkeypatch.setattr(supervised, "_step", real)
    assert api.sft(resume="cut").steps == 2


def test_it_resumes_on_the_same_demonstrations_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollart.backends.trainers import supervised

    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    Path("demos.jsonl").write_text('{"turns": [{"observation": "say a", "action": "a"}]}\n')
    monkeypatch.setattr(supervised, "_step", interrupted)
    with pytest.raises(Interrupted):
        sft(**FAST, demonstrations="demos.jsonl", out="cut")
    Path("demos.jsonl").write_text('{"turns": [{"observation": "say a", "action": "b"}]}\n')
    with pytest.raises(RequestError, match="are not those that it was started with"):
        api.sft(resume="cut")


# --- demonstrations -------------------------------------------------------------------------------------------------


def read(*sources: str, **changes: Any) -> list[Any]:
    return read_demonstrations(config(**changes), sources, lambda _: None)


def test_a_played_episode_has_the_tokens_of_a_rollout(tmp_path: Path) -> None:
    """Players act through the environment host; text transcripts are rendered to the same tokens."""
    from rollart.app.cold_start import make_small_model
    from rollart.app.compose import prompts_of
    from rollart.app.players import Played, PlayedTask

    make_small_model(tmp_path / "hf", steps=1)
    for model in (parrot.CONFIG["model"], str(tmp_path / "hf")):
        own = config(model=model) if isinstance(model, dict) else check(RunConfig, parrot.CONFIG | {"model": model})
        codec = teaching_codec(own)
        prompts = prompts_of(own, "parrot", held_out=False)
        with PlayedTask(own, "parrot", codec.answer) as stage:
            for _ in range(4):
                played = stage.play(prompts.next(), parrot.player, 0)
                assert isinstance(played, Played)
                assert played.reward is None, "none is asked for"
                assert [len(turns) for turns in played.sequences] == [2]
                assert rendered(codec, played.transcript) == played.sequences
                (turns,) = played.sequences
                assert all(answer[-1] in codec.stop_tokens for _, answer in turns)


def test_transcripts_and_messages_of_a_file() -> None:
    lines = [
        {"task": "parrot", "turns": [{"observation": "say a", "action": "a", "reward": 0.5}]},
        {"messages": [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a"}], "reward": 0.25},
        {
            "turns": [
                {"observation": "say a", "action": "a"},
                {"observation": "say b", "action": "b", "fresh_context": True},
            ]
        },
    ]
    Path("demos.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    one, other, two_contexts = read("demos.jsonl")
    codec = ByteCodec()
    assert one.sequences == other.sequences == [[(codec.render("say a", first=True), codec.answer("a"))]]
    assert (one.reward, other.reward, two_contexts.reward) == (0.5, 0.25, 0.0)
    assert [turns[0][0][0] for turns in two_contexts.sequences] == [259, 259], "both begin an episode"
    assert [each.reward for each in read("demos.jsonl", sft={"min_reward": 0.3})] == [0.5]


SYSTEM_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|agent|>' + m['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + m['role'] + ' ' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|agent|>' }}{% endif %}"
)


def test_a_chat_template_renders_messages_of_any_role(tmp_path: Path) -> None:
    from rollart.app.cold_start import make_small_model

    make_small_model(tmp_path / "hf", steps=1)
    (tmp_path / "hf" / "chat_template.jinja").write_text(SYSTEM_TEMPLATE)
    own = check(RunConfig, parrot.CONFIG | {"model": str(tmp_path / "hf")})
    codec = teaching_codec(own)
    said = [("user", "say a"), ("assistant", "a"), ("user", "say b"), ("assistant", "b")]
    plain, with_system = (
        [{"role": role, "content": text} for role, text in messages]
        for messages in (said, [("system", "brief"), *said])
    )
    Path("demos.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in (plain, with_system)))
    found, other = read_demonstrations(own, ["demos.jsonl"], lambda _: None)
    turns = [(codec.render("say a", True), codec.answer("a")), (codec.render("say b", False), codec.answer("b"))]
    assert found.sequences == [turns], "as in a rollout"
    assert other.sequences[0][1:] == turns[1:]
    assert "brief" in codec.text(other.sequences[0][0][0])


def test_a_run_is_filtered_by_reward() -> None:
    run = api.run(parrot.CONFIG, **FAST, out="run", steps=2, tasks={"parrot": {"temperature": 1.0}})
    stored = list(read_transcripts(run.folder / "transcripts"))
    with pytest.raises(RequestError, match=r"say which to imitate with sft.min_reward"):
        read("run")
    everything = read("run", sft={"min_reward": 0.0})
    assert 0 < len(everything) <= len(stored)
    with pytest.raises(RequestError, match="there are no demonstrations"):
        read("run", sft={"min_reward": 2.0})


def test_bad_episodes_of_a_player_are_left_out() -> None:
    said: list[str] = []
    clumsy = f"{parrot.__file__}:clumsy"
    kept = read_demonstrations(config(sft={"min_reward": 1.0}), [clumsy], said.append)
    assert 0 < len(kept) < 40
    assert all(each.reward == 1.0 for each in kept)
    assert said[0].endswith(f"{len(kept)} demonstrations, {40 - len(kept)} below a reward of 1 left out")


def test_turns_beyond_the_context_are_left_out() -> None:
    said: list[str] = []
    own = config(tasks={"parrot": {"max_context": 14}})
    assert all(len(each.sequences[0]) == 1 for each in read_demonstrations(own, [PLAYER], said.append))
    assert said[-1] == "40 of 80 turns are beyond max_context and left out" or len(said) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "there is no such file or folder"),
        ("parot=missing.jsonl", r"there is no task 'parot' \(did you mean parrot\?\)"),
        (f"{parrot.__file__}:plyer", "did you mean player"),
        (f"{parrot.__file__}:silent", "the player returned a NoneType"),
        (f"{parrot.__file__}:verbose", "an agent may say 4 in a turn; raise tasks.parrot.max_turn_tokens"),
        (".", "it has no config.json; give the folder of a run"),
        ("bad.jsonl", "bad.jsonl:1 is not JSON"),
        ("list.jsonl", "list.jsonl:1 is a list; it must be an object"),
        ("task.jsonl", r"task.jsonl:1: there is no task 'parot' \(did you mean parrot"),
        ("role.jsonl", r"role.jsonl:1: a message has the role 'robot'; roles are assistant, user"),
        ("turns.jsonl", r"turns.jsonl:1: .*action"),
    ],
)
def test_mistakes_are_refused_by_place(source: str, message: str) -> None:
    Path("bad.jsonl").write_text("{")
    Path("list.jsonl").write_text("[]")
    Path("task.jsonl").write_text('{"task": "parot", "turns": []}')
    Path("role.jsonl").write_text('{"messages": [{"role": "robot", "content": "hi"}]}')
    Path("turns.jsonl").write_text('{"turns": [{"observation": "say a"}]}')
    with pytest.raises(RequestError, match=message):
        read(source)


def test_what_cannot_be_trained_is_refused_before_anything_is_written() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ranks: supervised training has one rank"):
        sft(trainer={"ranks": 2}, out="sft")
    with pytest.raises(ConfigError, match="model: a cold start is made by the run itself"):
        api.sft(parrot.CONFIG | {"model": {"cold_start": {}}}, demonstrations=parrot.player, out="sft")
    assert not Path("sft").exists()
