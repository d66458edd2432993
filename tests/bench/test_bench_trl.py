"""`rollart bench trl`: the same work on both sides, and the loop that TRL is given.

What needs TRL itself is skipped where it is missing. To run all of it, in an environment of its own:

    pip install -e '.[trl,dev]' && pytest tests/bench/test_bench_trl.py
"""

import ast
import itertools
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from rollart.app import cold_start
from rollart.app.api import merged
from rollart.app.running import read_config
from rollart.app.task_checks import prompts_of
from rollart.backends.environments.hf_codec import HfCodec
from rollart.backends.environments.inject import hangs
from rollart.bench import trl_run as bench_trl_run
from rollart.bench.trl import LATENCY, OURS, THEIRS, WAYS, Played, ScriptOrder, Steps, load_work, ratios
from rollart.bench.trl_played import played_here
from rollart.bench.trl_rollout import Episode, Game, play
from rollart.bench.trl_run import check_trl, compared, order_of, train_here, train_there
from rollart.bench.trl_scripts import ROWS, count_lines, lines_of_code, run_script, script, script_order, write_rows
from rollart.bench.trl_side import Lake, lake_tokenizer, main
from rollart.cli.main import main as rollart
from rollart.config.injection import Injection
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.tasks.prompts import SeedPrompts
from rollart.tasks.tokenizer import AGENT, END, USER
from rollart.types import journal as j
from rollart.types.errors import EnvironmentFault, RequestError, RunError
from rollart.types.trajectory import Outcome, Prompt, Purpose
from rollart.types.versions import Version

NO_TROUBLE = Injection()
KEYS = {
    "over_dataset",
    "over_environment_factory",
    "over_environment_factory_latency",
    "over_rollout_func",
    "over_rollout_func_latency",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_start, "TRANSCRIPTS", dict.fromkeys(cold_start.TRANSCRIPTS, 4))
        cold_start.make_small_model(folder, steps=2)
    return str(folder)


def tiny(model, **changes):
    """The committed run, with two groups of two."""
    small = {"model": model, "batch": {"trajectories": 4, "group_size": 2}}
    return merged(load_work().run, small | changes)


def prompts(count):
    source = SeedPrompts("frozenlake", 0, 100, held_out=False)
    return [source.next() for _ in range(count)]


# --- the work -------------------------------------------------------------------------------------------------------


def test_the_committed_work_is_what_the_command_says():
    work = load_work()
    run = check(RunConfig, work.run)
    slow = check(RunConfig, merged(work.run, work.latency))
    for config in (run, slow):
        task = config.tasks["frozenlake"]
        assert (config.batch.trajectories, config.batch.group_size) == (64, 8)
        assert (task.max_turns, task.max_turn_tokens, task.temperature) == (8, 16, 1.0)
        assert (config.batch.extra_groups, config.batch.extra_members) == (0, None)
        assert min(task.reset_deadline_s, task.step_deadline_s) > 5.0
        assert (config.algorithm.epochs, config.algorithm.minibatches) == (1, 1)
        assert config.pools["local"].dtype == config.trainer.dtype == "float32"
    assert (run.mode, run.alpha) == ("rollart", 2)
    assert slow.mode == "areal"  # it finishes what it started, whatever hung
    assert run.tasks["frozenlake"].inject == ()
    assert slow.tasks["frozenlake"].inject == (Injection(latency_ms=50.0, sigma=1.0, hang_share=0.01, hang_s=5.0),)
    assert set(work.steps) == {side + suffix for side in ("rollart", *WAYS) for suffix in ("", LATENCY)} | {
        OURS,
        THEIRS,
    }
    assert all(steps.warm_up >= 1 and steps.counted >= 2 for steps in work.steps.values())
    assert 64 % work.rows == 0


def test_trl_gets_the_prompts_of_the_run_in_their_order(model):
    config = check(RunConfig, tiny(model, seed=3))
    order = order_of(config, "rollout_func", Steps(1, 2), rows=4)
    source = prompts_of(config, "frozenlake", held_out=False)
    assert order.prompts == [source.next() for _ in range(6)]
    assert (order.steps, order.groups, order.trajectories) == (3, 2, 4)
    assert order.inject == {}


# --- the hand-written loop ------------------------------------------------------------------------------------------


def played(model, count, answer, injection=NO_TROUBLE, max_turns=8):
    """`count` episodes in which the agent always gives the same answer."""
    codec = HfCodec(model)
    episodes = [Episode(Game(0, injection), prompt, codec, max_turns) for prompt in prompts(count)]
    with ThreadPoolExecutor(count) as threads:
        play(episodes, lambda contexts: [codec.answer(answer) for _ in contexts], threads)
    return episodes


def test_an_episode_has_the_tokens_that_rollart_renders(model):
    (episode,) = played(model, 1, "what?", max_turns=2)
    text = HfCodec(model)._tokenizer.decode(episode.context, skip_special_tokens=False)
    first, second = text.removeprefix(USER).split(END + USER)
    assert first.endswith(f"{AGENT}what?")
    assert second.startswith("Say L, D, R or U.\n0,0 open:")
    assert second.endswith(f"{AGENT}what?{END}")
    sampled = [token for token, mask in zip(episode.completion_ids, episode.mask, strict=True) if mask]
    assert sampled == HfCodec(model).answer("what?") * 2
    assert (episode.game.turns, episode.game.done) == (2, False)


def test_an_answer_that_was_cut_off_is_ended_in_the_context(model):
    codec = HfCodec(model)
    episode = Episode(Game(0, NO_TROUBLE), prompts(1)[0], codec, max_turns=8)
    episode.advance()
    episode.answered(codec.answer("what?")[:-1])
    episode.advance()
    end = codec.stop_tokens[0]
    cut = len(codec.answer("what?")) - 1
    assert (episode.completion_ids[cut], episode.mask[cut]) == (end, 0)


def test_no_batch_waits_for_a_slow_environment(model):
    gate = threading.Event()

    class Slow(Game):
        def play(self, answer):
            gate.wait(100)
            return super().play(answer)

    codec = HfCodec(model)
    slow, quick = (
        Episode(kind(0, NO_TROUBLE), prompt, codec, max_turns=3)
        for kind, prompt in zip((Slow, Game), prompts(2), strict=True)
    )
    batches = []

    def generate(contexts):
        batches.append(len(contexts))
        if quick.game.turns == 2:
            gate.set()  # its last answer is asked for, and the other one is still in its first step
        return [codec.answer("what?") for _ in contexts]

    with ThreadPoolExecutor(2) as threads:
        play([slow, quick], generate, threads)
    assert gate.is_set()
    assert slow.game.turns == quick.game.turns == 3
    assert sum(batches) == 6


def test_what_an_environment_raises_ends_the_rollout(model):
    with pytest.raises(EnvironmentFault, match="injected"):
        played(model, 1, "what?", Injection(raise_every=2))


def test_a_game_tells_whether_it_hung(model):
    injection = Injection(hang_share=0.5, hang_s=0.001)
    episodes = played(model, 4, "what?", injection, max_turns=2)
    expected = [any(hangs(injection, each._prompt.seed, 0, turn) for turn in range(3)) for each in episodes]
    assert [each.game.hung for each in episodes] == expected
    assert any(expected)
    assert not any(each.game.hung for each in played(model, 4, "what?", max_turns=2))


# --- TRL's own loop -------------------------------------------------------------------------------------------------


def test_tools_are_rendered_as_the_codec_renders_observations(model):
    tokenizer, codec = lake_tokenizer(model), HfCodec(model)
    first = [{"role": "user", "content": "0,0 open:DR"}]
    call = {"type": "function", "function": {"name": "move", "arguments": {}}}
    called = [*first, {"role": "assistant", "content": "", "tool_calls": [call]}]
    seen = [*called, {"role": "tool", "name": "move", "content": "1,0 open:D"}]

    def ids(messages, **how):
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **how)

    assert ids(first, add_generation_prompt=True) == codec.render("0,0 open:DR", first=True)
    before, after = ids(called), ids(seen, add_generation_prompt=True)
    assert after[: len(before)] == before
    assert after[len(before) :] == codec.render("1,0 open:D", first=False)


def test_an_answer_is_a_call_until_the_episode_is_over(model):
    tokenizer, codec = lake_tokenizer(model), HfCodec(model)
    lake = Lake(prompts(1), Game(0, NO_TROUBLE))
    context = codec.render(lake.reset(number=0, prompt=[]), first=True)
    for _ in range(20):  # to the right and down there is an end: the goal, a hole, or the corner
        move = "R" if lake.game.turns % 2 else "D"
        answer = codec.answer(move)
        message = tokenizer.parse_response(answer, prefix=context, tools=[lake.move])
        if "tool_calls" not in message:
            break
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "move", "arguments": {"answer": move}}
        context += answer + codec.render(lake.move(**call["function"]["arguments"]), first=False)
    assert lake.game.done
    assert message["content"] == move


@pytest.mark.parametrize("way", WAYS)
def test_trl_plays_and_trains(model, way):
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'rollart[trl]'")
    tables = tiny(model, tasks={"frozenlake": {"max_turns": 3, "inject": {"hang_share": 0.5, "hang_s": 0.01}}})
    order = order_of(check(RunConfig, tables), way, Steps(1, 2), rows=2)
    # One thread: several are slow beyond measure on a machine that does something else.
    result = train_there(Path(sys.executable), msgspec.structs.replace(order, threads=1))
    assert result.trajectories == 8
    assert result.seconds > 0
    assert 1 <= result.turns <= 3
    assert result.turns <= result.tokens <= 3 * 16
    assert 0 < result.hung <= 1


@pytest.mark.parametrize("arguments", [[], ["no-such-file"], ["one", "two"]])
def test_a_wrong_order_is_told(arguments, capfd):
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert not out
    assert "usage:" in err


# --- a dataset and a reward, as scripts ------------------------------------------------------------------------------


def settings_in(side, call):
    """Literal keywords of a call in a script."""
    for node in ast.walk(ast.parse(script(side))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == call:
            pairs = ((each.arg, each.value) for each in node.keywords)
            return {name: ast.literal_eval(value) for name, value in pairs if not _computed(value)}
    raise AssertionError(f"{side} does not call {call}")


def _computed(value):
    return any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(value))


def test_both_scripts_train_the_same():
    ours = settings_in("rollart", "rollart.run") | settings_in("rollart", "rollart.Task")
    theirs = settings_in("trl", "GRPOConfig")
    assert ours["batch"] == {"trajectories": 64, "group_size": theirs["num_generations"]}
    assert theirs["per_device_train_batch_size"] == 64
    assert ours["max_turn_tokens"] == theirs["max_completion_length"]
    assert ours["trainer"] == {"learning_rate": theirs["learning_rate"]}
    assert "temperature" not in ours | theirs  # 1 on both sides
    assert (theirs["use_cpu"], theirs["bf16"]) == (True, False)  # float32, as rollart by itself


def test_lines_of_the_scripts():
    assert count_lines() == {"rollart": 16, "trl": 23}, "docs/performance.md says so"
    assert lines_of_code('def f():\n    """What.\n\n    More."""\n    return """\n\n"""  # why\n') == 4
    assert lines_of_code("") == 0


def test_rows_are_problems_with_their_first_step(tmp_path):
    rows = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == ROWS
    for row in rows:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        problem = message["content"].splitlines()[-1]
        assert row["answer"].startswith("C ")
        assert problem.startswith(row["answer"].removeprefix("C "))


def test_the_script_of_rollart_trains(model, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    rows = write_rows(tmp_path / "rows.jsonl")
    result = run_script(model, rows, Steps(1, 2), tmp_path / "run")
    assert (result.trajectories, result.turns, result.hung) == (128, 1.0, 0.0)
    assert 1 <= result.tokens <= 12
    assert result.cpu_ms.keys() == {"controller", "engine", "environment", "reward", "trainer"}
    config = read_config(tmp_path / "run")
    assert config.trainer.dtype == config.pools["local"].dtype == "float32"
    with pytest.raises(RunError, match=r"(?s)with_rollart\.py failed: .*no-such-rows"):
        run_script(model, tmp_path / "no-such-rows.jsonl", Steps(1, 2), tmp_path / "other")


def test_the_script_of_trl_trains(model, tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'rollart[trl]'")
    order = script_order(model, write_rows(tmp_path / "rows.jsonl"), Steps(1, 2))
    result = train_there(Path(sys.executable), msgspec.structs.replace(order, threads=1))
    assert (result.trajectories, result.turns, result.hung) == (128, 1.0, 0.0)
    assert 1 <= result.tokens <= 12


# --- rollart --------------------------------------------------------------------------------------------------------


def test_the_journal_tells_what_was_trained_after_the_warm_up():
    hung = next(seed for seed in range(99) if hangs(Injection(hang_share=0.5), seed, 0, 1))
    version = Version(0, 0)
    events = []
    for step in range(3):
        events += [
            j.PromptTaken(0.0, step, Prompt(step, "frozenlake", seed=hung), {}),
            j.GroupOpened(0.0, step, "frozenlake", step, Purpose.TRAIN, step, 0),
            j.TrajectoryStarted(0.0, step, step, 0, 0, "environment/frozenlake/0"),
            j.TrajectoryEnded(0.0, step, Outcome.COMPLETED, turns=step + 1, sampled=10 * step),
            j.BatchClaimed(0.0, step, step, version, version, (step,), (step,), (0,), (0,)),
            j.StepTrained(10.0 + 2 * step, step, version, 0.0, {}),
        ]
    result = played_here(events, 1, Injection(hang_share=0.5), {"engine": 1.5})
    assert result == Played(trajectories=2, seconds=4.0, turns=2.5, tokens=15.0, hung=1.0, cpu_ms={"engine": 1.5})
    assert played_here(events, 1, NO_TROUBLE, {}).hung == 0.0


def test_rollart_plays_and_trains(model, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    task = {"environments": 8, "max_turns": 3, "inject": {"hang_share": 0.5, "hang_s": 0.01}}
    result = train_here(tiny(model, alpha=4, tasks={"frozenlake": task}), Steps(1, 2), tmp_path / "run")
    assert result.trajectories == 8
    assert result.seconds > 0
    assert 1 <= result.turns <= 3
    assert 0 < result.hung <= 1
    assert result.cpu_ms.keys() == {"controller", "engine", "environment", "reward", "trainer"}
    assert all(spent > 0 for spent in result.cpu_ms.values())


# --- the command ----------------------------------------------------------------------------------------------------


def a_side(trajectories, seconds):
    return Played(
        trajectories=trajectories, seconds=seconds, turns=5, tokens=11, hung=0, cpu_ms={"trainer": 8.0, "engine": 7.0}
    )


def test_a_ratio_is_of_trajectories_per_second():
    sides = {side: [a_side(trajectories=64, seconds=8.0)] for side in load_work().steps}
    sides["rollart"] = [a_side(trajectories=128, seconds=seconds) for seconds in (1.0, 2.0, 16.0)]
    assert compared({side: sides[side] for side in (OURS, THEIRS)})["over_dataset"] == 1.0
    result = compared(sides)
    assert set(ratios()) == KEYS
    assert set(result) == {*KEYS, "sides", "rates", "cpu_ms"}
    assert result["rates"]["rollart"] == [128.0, 64.0, 8.0]
    assert result["rates"]["rollout_func"] == [8.0]
    assert result["cpu_ms"]["rollart"] == {"trainer": 8.0, "engine": 7.0}
    assert result["over_environment_factory"] == result["over_rollout_func"] == 8.0
    assert result["over_rollout_func_latency"] == 1.0
    assert result["sides"]["rollart"]["trajectories_per_s"] == 64.0


def fake_python(folder, version):
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + (f"echo {version}\n" if version else "exit 1\n"))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "problem"), [("", "has no TRL"), ("1.15.2", "has TRL 1.15.2"), ("1.160.0", "1.160")]
)
def test_another_trl_is_refused(tmp_path, version, problem):
    with pytest.raises(RequestError, match=problem):
        check_trl(fake_python(tmp_path, version))


def test_the_right_trl_is_taken_and_no_python_refused(tmp_path):
    check_trl(fake_python(tmp_path, "1.16.3"))
    with pytest.raises(RequestError, match="No such file"):
        check_trl(tmp_path / "nowhere")


def test_all_sides_are_measured_and_json_is_all_there_is_on_stdout(tmp_path, monkeypatch, capsys, model):
    asked = []

    def here(tables, steps, folder):
        asked.append((folder.name, tables["alpha"], tables["model"], steps))
        return a_side(trajectories=10, seconds=1.0)

    def script(model, rows, steps, folder):
        assert rows.is_file()
        asked.append((folder.name, model, steps))
        return a_side(trajectories=10, seconds=1.0)

    def there(_, order):
        if isinstance(order, ScriptOrder):
            asked.append((order.side, order.model, Steps(order.warm_up, order.steps - order.warm_up)))
            return a_side(trajectories=10, seconds=4.0)
        asked.append((order.way, bool(order.inject), order.model, Steps(order.warm_up, order.steps - order.warm_up)))
        return a_side(trajectories=10, seconds=4.0)

    monkeypatch.setattr(bench_trl_run, "train_here", here)
    monkeypatch.setattr(bench_trl_run, "train_there", there)
    monkeypatch.setattr(bench_trl_run, "run_script", script)
    monkeypatch.setattr(bench_trl_run, "with_model", lambda config, _: config.model_copy(update={"model": model}))
    python = str(fake_python(tmp_path, "1.16.0"))
    for options in (["--json"], [], ["--part", "dataset", "--json"]):
        asked.clear()
        monkeypatch.setattr(sys, "argv", ["rollart", "bench", "trl", "--python", python, *options])
        with pytest.raises(SystemExit) as ended:
            rollart()
        assert not ended.value.code
        out = capsys.readouterr().out
        if "--part" in options:
            assert json.loads(out).keys() == {"over_dataset", "lines", "sides", "rates", "cpu_ms"}
        elif options:
            assert {key: value for key, value in json.loads(out).items() if key in KEYS} == dict.fromkeys(KEYS, 4.0)
        else:
            assert "over_rollout_func_latency: 4.0" in out
            assert f"dataset and reward in trl: {count_lines()['trl']} lines" in out
            assert "rollout_func: 15.0 ms of CPU per trajectory (trainer 8.0, engine 7.0)" in out
        work = load_work()
        steps = work.steps
        assert work.rounds == 3
        rounds = [
            [
                (f"rollart-{number}", work.run["alpha"], model, steps["rollart"]),
                ("environment_factory", False, model, steps["environment_factory"]),
                ("rollout_func", False, model, steps["rollout_func"]),
            ]
            for number in range(work.rounds)
        ]
        dataset = [
            each
            for number in range(work.rounds)
            for each in [(f"{OURS}-{number}", model, steps[OURS]), (THEIRS, model, steps[THEIRS])]
        ]
        if "--part" in options:
            assert asked == dataset
            continue
        assert asked == [
            *itertools.chain.from_iterable(rounds),
            ("rollart_latency-3", 4, model, steps["rollart_latency"]),
            ("environment_factory", True, model, steps["environment_factory_latency"]),
            ("rollout_func", True, model, steps["rollout_func_latency"]),
            *dataset,
        ]
