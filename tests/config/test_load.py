"""From TOML and overrides to a checked config: every refusal names the key and, where it can, the right spelling."""

from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import check, load_toml, override
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.types.errors import ConfigError, RequestError

SMALLEST: dict[str, Any] = {"tasks": {"maze": {}}, "pools": {"local": {}}}


def refused(*assignments: str, data: dict[str, Any] = SMALLEST) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(RunConfig, override(data, assignments))
    return caught.value


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "läuft"\n[batch]\ngroup_size = 4\n', encoding="utf-8")
    assert load_toml(path) == {"name": "läuft", "batch": {"group_size": 4}}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: no such config file"):
        load_toml(tmp_path / "gone.toml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; give the path of a config file"):
        load_toml(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").symlink_to("run.toml")
    with pytest.raises(ConfigError, match=r"run\.toml cannot be read: "):
        load_toml(tmp_path / "run.toml")


@pytest.mark.parametrize("content", [b"steps = ", b"steps = 1\nsteps = 2\n", b"name = '\xff'"])
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: ") as caught:
        load_toml(path)
    assert caught.value.path == ""
    assert isinstance(caught.value, RequestError)


# --- overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ("{ size = 2 }", {"size": 2}),
        ("rollart", "rollart"),
        ("some text", "some text"),
        ("", ""),
        ("a=b", "a=b"),
        (" 3 ", 3),
    ],
)
def test_values_are_toml_or_else_text(text: str, value: object) -> None:
    assert override({}, [f"key={text}"]) == {"key": value}


def test_a_path_leads_through_tables_and_makes_them() -> None:
    data = {"batch": {"group_size": 8, "trajectories": 64}}
    assert override(data, ["batch.group_size=4", " tasks.maze.share = 2", "steps=1", "steps=2"]) == {
        "batch": {"group_size": 4, "trajectories": 64},
        "tasks": {"maze": {"share": 2}},
        "steps": 2,
    }


def test_what_was_loaded_is_left_alone() -> None:
    data = {"batch": {"group_size": 8}}
    override(data, ["batch.group_size=4", "batch.trajectories=8"])
    assert data == {"batch": {"group_size": 8}}


@pytest.mark.parametrize("bad", ["steps", "=3", "batch..group_size=3", "batch.=3", ".steps=3", " =3", ""])
def test_an_assignment_is_key_and_value(bad: str) -> None:
    with pytest.raises(ConfigError, match="write key=value, such as --set") as caught:
        override({}, [bad])
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "path"), [("steps.x=1", "steps"), ("batch.group_size.x=1", "batch.group_size"), ("steps.x.y=1", "steps")]
)
def test_an_assignment_cannot_go_through_a_value(bad: str, path: str) -> None:
    with pytest.raises(ConfigError, match="is not a table, so --set") as caught:
        override({"steps": 1, "batch": {"group_size": 8}}, [bad])
    assert caught.value.path == path


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "path", "meant"),
    [
        ("stepz=3", "stepz", "steps"),
        ("batch.group_sise=3", "batch.group_sise", "group_size"),
        ("deadlines.turns=3", "deadlines.turns", "turn_s"),
        ("tasks.maze.sahre=3", "tasks.maze.sahre", "share"),
        ("tasks.maze.Max_Turns=3", "tasks.maze.Max_Turns", "max_turns"),
        ("pools.local.hardwar=3", "pools.local.hardwar", "hardware"),
        ("trainer.lerning_rate=3", "trainer.lerning_rate", "learning_rate"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest_known_one(assignment: str, path: str, meant: str) -> None:
    error = refused(assignment)
    assert error.path == path
    assert error.problem == f"unknown key (did you mean {meant}?)"
    assert str(error).startswith(f"{path}: ")


def test_an_unknown_key_that_is_close_to_nothing_is_just_unknown() -> None:
    error = refused("tasks.maze.zzzz=3")
    assert (error.path, error.problem) == ("tasks.maze.zzzz", "unknown key")


def test_a_key_of_an_earlier_version_is_refused_with_the_new_one() -> None:
    error = refused("deadlines.engine_joins_s=300")
    assert error.path == "deadlines.engine_joins_s"
    assert error.problem.startswith("is now called model_loads_s")


@pytest.mark.parametrize(
    ("assignment", "path", "problem"),
    [
        (
            "mode=rolart",
            "mode",
            "input should be 'sync', 'sync_plus', 'one_off', 'areal' or 'rollart', not 'rolart' "
            "(did you mean rollart?)",
        ),
        (
            "tasks.maze.unfilled=stopp",
            "tasks.maze.unfilled",
            "input should be 'redistribute' or 'stop', not 'stopp' (did you mean stop?)",
        ),
        (
            "tasks.maze.stale=maks",
            "tasks.maze.stale",
            "input should be 'abort' or 'mask', not 'maks' (did you mean mask?)",
        ),
        ("tasks.maze.stale=zzz", "tasks.maze.stale", "input should be 'abort' or 'mask', not 'zzz'"),
        ("mode=3", "mode", "input should be 'sync', 'sync_plus', 'one_off', 'areal' or 'rollart', not 3"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_choices(assignment: str, path: str, problem: str) -> None:
    error = refused(assignment)
    assert (error.path, error.problem) == (path, problem)


@pytest.mark.parametrize(
    ("assignment", "path", "problem"),
    [
        ("steps=many", "steps", "input should be a valid integer, unable to parse string as an integer, not 'many'"),
        ("steps=0.5", "steps", "input should be a valid integer, got a number with a fractional part, not 0.5"),
        ("steps=0", "steps", "input should be greater than 0, not 0"),
        ("alpha=-1", "alpha", "input should be greater than or equal to 0, not -1"),
        ("seed=9223372036854775808", "seed", f"input should be less than {2**63}, not {2**63}"),
        ("name=3", "name", "input should be a valid string, not 3"),
        ("tasks=3", "tasks", "input should be a valid dictionary, not 3"),
        ("tasks.maze.environments=[]", "tasks.maze.environments", "input should be a valid integer, not []"),
        ("tasks.maze.fallback=[3]", "tasks.maze.fallback.0", "input should be a valid string, not 3"),
        ("tasks.maze.prompts=[1]", "tasks.maze.prompts.1", "is missing"),
        ("model=3", "model", "input should be a valid string, not 3"),
        (
            "algorithm.advantage=grop",
            "algorithm.advantage",
            "there is no advantage 'grop' (did you mean grpo?); built in are grpo, dr_grpo, rloo, reinforce_plus_plus, "
            "gigpo, gae, and one of your own is named by its factory path, such as 'my_advantages.py:ranked'",
        ),
        ("algorithm.trace=1.5", "algorithm.trace", "input should be less than or equal to 1, not 1.5"),
        ("algorithm.epochs=0", "algorithm.epochs", "input should be greater than 0, not 0"),
        ("algorithm.loss.clip_low=2.0", "algorithm.loss.clip_low", "input should be less than or equal to 1, not 2.0"),
        (
            'algorithm.loss={kl_weight=0.1, kl_estimator="k1"}',
            "algorithm.loss",
            "k1 cannot be a penalty in the loss: its gradient is 0 in expectation, whatever the distance. Use k2, "
            "which has the intended gradient, or k3",
        ),
        ("algorithm.loss.klweight=0.1", "algorithm.loss.klweight", "unknown key (did you mean kl_weight?)"),
    ],
)
def test_a_wrong_value_is_refused_with_what_it_should_be(assignment: str, path: str, problem: str) -> None:
    error = refused(assignment)
    assert (error.path, error.problem) == (path, problem)


@pytest.mark.parametrize(
    "key",
    [
        "tasks.maze.share",
        "tasks.maze.temperature",
        "tasks.maze.reset_deadline_s",
        "tasks.maze.share_deadline_s",
        "deadlines.turn_s",
        "trainer.learning_rate",
        "trainer.max_grad_norm",
    ],
)
@pytest.mark.parametrize("value", ["inf", "nan", "0.0", "-1.0"])
def test_no_wait_is_for_ever_and_no_number_is_not_one(key: str, value: str) -> None:
    assert refused(f"{key}={value}").path == key


def test_a_missing_table_is_named() -> None:
    error = refused(data={"pools": {"local": {}}})
    assert (error.path, error.problem) == ("tasks", "is missing")
    assert refused(data={"tasks": {"maze": {}}}).path == "pools"


def test_the_first_problem_is_told() -> None:
    assert refused("mode=x", "steps=0").path in ("mode", "steps")


# --- spelling -------------------------------------------------------------------------------------------------------


def test_the_closest_word_whatever_its_case() -> None:
    assert did_you_mean("h800", ["H20", "H800"]) == " (did you mean H800?)"
    assert did_you_mean("H800", []) == ""
    assert did_you_mean("xyz", ["H20"]) == ""


# --- one table where a list of them may stand -----------------------------------------------------------------------


def test_one_injection_or_several() -> None:
    one = check(RunConfig, override(SMALLEST, ["tasks.maze.inject.raise_every=3"])).tasks["maze"].inject
    several = check(RunConfig, override(SMALLEST, ["tasks.maze.inject=[{raise_every = 3}, {}]"])).tasks["maze"].inject
    assert one == several[:1]
    assert len(several) == 2
    assert check(RunConfig, SMALLEST).tasks["maze"].inject == ()


@pytest.mark.parametrize(
    ("given", "path"), [("{latency = 3}", "inject.latency"), ("[{}, {latency = 3}]", "inject.1.latency")]
)
def test_a_typo_in_an_injection_is_named_where_it_stands(given: str, path: str) -> None:
    error = refused(f"tasks.maze.inject={given}")
    assert error.path == f"tasks.maze.{path}"
    assert "latency_ms" in str(error)
