"""Settings of the loss: what the kinds default to, and what is refused with a reason."""

import inspect
import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from rollart.algo.advantage import gae, gigpo, reinforce_plus_plus
from rollart.config.algorithm import AdvantageKind, Aggregation, AlgorithmSettings, CorrectionSettings, LossSettings


@pytest.mark.parametrize(
    ("kind", "bounds", "aggregation"),
    [
        ("ppo", (0.8, 1.2, math.inf), Aggregation.TOKEN_MEAN),
        ("gspo", (0.9997, 1.0004, math.inf), Aggregation.SEQUENCE_MEAN),
        ("cispo", (0.0, 5.0, math.inf), Aggregation.TOKEN_MEAN),
    ],
)
def test_every_kind_has_its_own_defaults(kind, bounds, aggregation):
    settings = LossSettings(kind=kind)
    assert settings.ratio_bounds() == pytest.approx(bounds)
    assert settings.aggregated_by() is aggregation


def test_what_is_set_wins():
    settings = LossSettings(kind="gspo", clip_high=0.28, aggregation="token_mean")
    assert settings.ratio_bounds() == pytest.approx((0.9997, 1.28, math.inf))
    assert settings.aggregated_by() is Aggregation.TOKEN_MEAN


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "ppp"}, "did you mean ppo?"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
        ({"clip_high": 0}, "greater than 0"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"dual_clip": math.inf}, "finite number"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "dual_clip applies only to the loss `ppo`"),
        ({"kl_weight": -1.0}, "greater than or equal to 0"),
        ({"kl_weight": float("nan")}, "finite number"),
        ({"kl_weight": 0.1, "kl_estimator": "k1"}, "gradient is 0 in expectation"),
        ({"klweight": 0.1}, "Extra inputs are not permitted"),
        ({"correction": {"kind": "truncate", "floor": 0.5}}, "floor applies only to the correction `mask`"),
        ({"correction": {"kind": "mask", "floor": 3.0}}, "must be below the cap"),
        ({"correction": {"kind": "truncate", "cap": 0.5}}, "would cut the weight 1"),
        ({"correction": {"kind": "mask", "floor": 1.5}}, "would mask the weight 1"),
    ],
)
def test_mistakes_are_refused_with_a_reason(settings, reason):
    with pytest.raises(ValidationError) as refusal:
        LossSettings.model_validate(settings)
    assert reason in str(refusal.value)


def test_k1_may_be_measured():
    assert LossSettings(kl_estimator="k1").kl_weight == 0


def test_icepop():
    CorrectionSettings(kind="mask", level="token", floor=0.5, cap=5.0)


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def test_a_critic_is_there_for_gae_only_and_has_what_is_set():
    assert [kind for kind in AdvantageKind if AlgorithmSettings(advantage=kind).critic()] == [AdvantageKind.GAE]
    usual = AlgorithmSettings(advantage="gae").critic()
    assert (usual.discount, usual.trace) == (defaults(gae)["discount"], defaults(gae)["trace"])
    assert (usual.value_weight, usual.value_learning_rate, usual.whiten) == (0.5, None, True)
    chosen = AlgorithmSettings(advantage="gae", discount=0.5, whiten=False, value_learning_rate=0.1).critic()
    assert (chosen.discount, chosen.trace, chosen.whiten, chosen.value_learning_rate) == (0.5, 0.95, False, 0.1)


def test_what_the_settings_promise_is_what_the_functions_do():
    assert defaults(gigpo) == {"step_weight": 1.0, "discount": 0.95, "normalise": True}
    assert defaults(reinforce_plus_plus) == {"group_baseline": False}


def test_they_import_without_torch():
    code = "import sys, rollart.config.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
