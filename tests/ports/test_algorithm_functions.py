"""Advantages and losses of users: loaded, checked and called like the built-in ones."""

import numpy as np
import own_algorithms as own
import pytest
from real_cli import CONFIG, small_task

from rollart.app import algorithm_trial
from rollart.app.algorithm_trial import check_algorithm, made_up_batch
from rollart.config.algorithm import AdvantageKind, AlgorithmSettings, LossSettings, PolicyLoss
from rollart.config.load import check, load_toml, override
from rollart.config.schema import RunConfig
from rollart.ports.advantage import Estimator
from rollart.ports.algorithm import advantage_of, surrogate_of
from rollart.types.errors import AdvantageFailed, ConfigError

BATCH = made_up_batch(["maze", "math"], 4)


def algorithm(advantage: str, **settings: object) -> AlgorithmSettings:
    return check(AlgorithmSettings, {"advantage": own.HERE + advantage, **settings})


def config(**tables: object) -> RunConfig:
    import tomllib

    return check(RunConfig, tomllib.loads(CONFIG) | {"algorithm": tables})


@pytest.mark.parametrize("kind", AdvantageKind)
def test_built_in_advantages_use_the_same_door(kind: AdvantageKind) -> None:
    estimator = advantage_of(AlgorithmSettings(advantage=kind))
    made = estimator.per_turn(BATCH)
    assert [[len(turns) for turns in group] for group in made] == [[m.turns for m in g.members] for g in BATCH]
    assert advantage_of(AlgorithmSettings(advantage=estimator_path(kind))).per_turn(BATCH) == made  # type: ignore[arg-type]


def estimator_path(kind: AdvantageKind) -> str:
    return AlgorithmSettings(advantage=kind).advantage_factory()[0]


@pytest.mark.parametrize("kind", PolicyLoss)
def test_built_in_losses_use_the_same_door(kind: PolicyLoss) -> None:
    settings = LossSettings(kind=kind)
    assert surrogate_of(settings) is surrogate_of(LossSettings(kind=settings.factory()))


def test_an_advantage_of_ones_own_equals_the_built_in_one() -> None:
    mine = advantage_of(algorithm("same_as_grpo")).per_turn(BATCH)
    for own_group, group in zip(mine, advantage_of(AlgorithmSettings()).per_turn(BATCH), strict=True):
        assert [turns == pytest.approx(other) for turns, other in zip(own_group, group, strict=True)]
    per_turn = advantage_of(algorithm("first_turn_only")).per_turn(BATCH)
    assert per_turn[0][1] == [1.0, 0.0]
    softer = advantage_of(algorithm("same_as_grpo", advantage_settings={"epsilon": 1.0})).per_turn(BATCH)
    assert abs(softer[0][0][0]) < abs(mine[0][0][0])


def test_numpy_arrays_are_accepted() -> None:
    estimator = Estimator("mine", lambda batch: [np.array(group.rewards) for group in batch], {})
    assert estimator.per_turn(BATCH)[0][1] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_too_few", r"one_too_few returned 3 values for group 0 of maze, which has 4 trajectories"),
        ("not_a_number", r"not_a_number returned nan for trajectory 0 \(group 0 of maze\)"),
        ("not_a_list", r"not_a_list returned a float for the batch"),
        ("raises", r"raises raised KeyError: 'maze'"),
    ],
)
def test_what_is_no_advantage_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(AdvantageFailed, match=message):
        advantage_of(algorithm(name)).per_turn(BATCH)
    with pytest.raises(ConfigError, match=message) as error:
        check_algorithm(config(advantage=own.HERE + name))
    assert error.value.path == "algorithm.advantage"


@pytest.mark.parametrize(
    ("tables", "path", "message"),
    [
        ({"advantage": "grop"}, "algorithm.advantage", r"'grop' \(did you mean grpo\?\).*factory path"),
        ({"advantage": own.HERE + "same_as_grop"}, "algorithm.advantage", r"did you mean same_as_grpo"),
        ({"advantage": own.HERE + "no_arguments"}, "algorithm.advantage_settings", r"is called with 1 argument"),
        ({"advantage": own.HERE + "random"}, "algorithm.advantage", r"different advantages for the same batch"),
        (
            {"advantage": own.HERE + "same_as_grpo", "advantage_settings": {"epsilom": 1.0}},
            "algorithm.advantage_settings.epsilom",
            r"did you mean epsilon",
        ),
        ({"advantage_settings": {"epsilon": 1.0}}, "algorithm", r"those of 'grpo' are keys of this table"),
        ({"advantage": own.HERE + "same_as_grpo", "discount": 0.5}, "algorithm.discount", r"is not used by"),
        ({"loss": {"kind": "pop"}}, "algorithm.loss.kind", r"did you mean ppo"),
        ({"loss": {"settings": {"scale": 1.0}}}, "algorithm.loss", r"settings are for a loss of your own"),
    ],
)
def test_mistakes_are_refused_before_the_run(tables: dict[str, object], path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_algorithm(config(**tables))
    assert error.value.path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_the_wrong_shape", r"of_the_wrong_shape returned a loss of shape \(\) for 5 tokens"),
        ("without_gradient", r"without_gradient has no gradient"),
        ("infinite", r"infinite has a loss that is not finite"),
        ("reinforces", r"did you mean reinforce\?"),
    ],
)
def test_losses_are_tried_in_a_process_of_their_own(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_algorithm(config(loss={"kind": own.HERE + name}))
    assert error.value.path == "algorithm.loss.kind"


def test_a_good_loss_and_its_settings_pass(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    kind = f"algorithm.loss.kind={own.HERE}reinforce"
    tables = override(load_toml(tmp_path / "config.toml"), [kind, "algorithm.loss.settings.scale=2.0"])
    check_algorithm(check(RunConfig, tables))
    with pytest.raises(ConfigError, match="did you mean scale"):
        check_algorithm(check(RunConfig, override(tables, ["algorithm.loss.settings.scala=2.0"])))


def test_a_loss_is_tried_with_the_import_paths_of_the_caller(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "mine_torch.py").write_text(f"from {own.__name__} import reinforce\n")
    monkeypatch.syspath_prepend(tmp_path / "project")
    monkeypatch.chdir(tmp_path)
    check_algorithm(config(loss={"kind": "mine_torch:reinforce"}))


def test_a_loss_that_does_not_return_is_refused(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(algorithm_trial, "TRIAL_S", 0.01)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"the loss .* took longer than 0.01 s"):
        check_algorithm(config(loss={"kind": own.HERE + "reinforce"}))
