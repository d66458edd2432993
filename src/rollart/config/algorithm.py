"""Settings of the algorithm. The formulas are in `rollart.algo`; this module imports without torch.

Defaults that differ between kinds (clip range, aggregation, discount) are those of the papers, unless set.
"""

import enum
import math
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from rollart.config.base import Strict
from rollart.config.suggest import did_you_mean

NotNegativeReal = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _known(kind: enum.Enum | str, what: str, example: str) -> enum.Enum | str:
    """Refuse a name that is neither built in nor a factory path."""
    if isinstance(kind, str) and not all(kind.rpartition(":")):
        names = [each.value for each in (PolicyLoss if what == "loss" else AdvantageKind)]
        raise ValueError(
            f"there is no {what} {kind!r}{did_you_mean(kind, names)}; built in are {', '.join(names)}, and one of your "
            f"own is named by its factory path, such as {example!r}"
        )
    return kind


class PolicyLoss(enum.Enum):
    """Factor of the gradient of a token's log-probability."""

    PPO = "ppo"
    """Clipped ratio of the token: the objective of PPO, GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++ and GiGPO."""
    GSPO = "gspo"
    """Clipped, length-normalised ratio of the token's sequence."""
    CISPO = "cispo"
    """Capped ratio of the token, as a constant: every token keeps a gradient."""


class Aggregation(enum.Enum):
    """How per-token terms are reduced to one number."""

    TOKEN_MEAN = "token_mean"
    """Mean over tokens: every token has the same weight, so long sequences weigh more (DAPO)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean of per-sequence means: every sequence has the same weight (GRPO, GSPO)."""


class KlEstimator(enum.Enum):
    """Per-token estimator of the divergence from the reference; see `rollart.algo.loss.kl_estimate`."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class CorrectionKind(enum.Enum):
    """Treatment of the importance weight of a token that another policy sampled."""

    NONE = "none"
    """Every weight is 1."""
    TRUNCATE = "truncate"
    """A weight above the cap becomes the cap (TIS)."""
    MASK = "mask"
    """A weight above the cap or below the floor becomes 0 (MIS, IcePop)."""


class CorrectionLevel(enum.Enum):
    """Level at which the ratio of the importance weight is computed."""

    TOKEN = "token"
    """Ratio of the token: low variance, ignores how likely its prefix was."""
    SEQUENCE = "sequence"
    """Product of the ratios of all sampled tokens of the sequence: exact, but useless for long sequences."""
    GEOMETRIC = "geometric"
    """Geometric mean over the sequence, independent of its length: finds off-policy sequences."""


class CorrectionSettings(Strict):
    """Importance correction of tokens from earlier versions, or from an engine with different numerics."""

    kind: CorrectionKind = CorrectionKind.NONE
    level: CorrectionLevel = CorrectionLevel.TOKEN
    cap: PositiveReal = 2.0
    floor: NotNegativeReal = 0.0
    """For `mask` only. IcePop uses 0.5 with a cap of 5."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.floor > 0 and self.kind is not CorrectionKind.MASK:
            raise ValueError(f"floor applies only to the correction `mask`, not to `{self.kind.value}`")
        if self.floor >= self.cap:
            raise ValueError(f"the floor ({self.floor:g}) must be below the cap ({self.cap:g})")
        if self.cap < 1:
            raise ValueError(f"a cap of {self.cap:g} would cut the weight 1 of tokens that need no correction")
        if self.floor > 1:
            raise ValueError(f"a floor of {self.floor:g} would mask the weight 1 of tokens that need no correction")
        return self


class RatioBounds(NamedTuple):
    """Ratios beyond which a token is clipped."""

    low: float
    high: float
    """For tokens with a positive advantage."""
    dual: float
    """For tokens with a negative advantage (dual clip)."""


class LossSettings(Strict):
    """Policy loss."""

    kind: Annotated[PolicyLoss | str, Field(union_mode="left_to_right")] = PolicyLoss.PPO
    """A built-in loss, or the factory path of one of your own: `my_losses.py:reinforce`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords for a loss of your own."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ratios below 1 − clip_low are clipped; 1 = never. None = the default of the kind; never for one of your own."""
    clip_high: PositiveReal | None = None
    """Ratios above 1 + clip_high are clipped. None = the default of the kind, never for one of your own; DAPO uses 0.28
    with `ppo`."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """`ppo`: ratio above which tokens with a negative advantage are clipped too; 3 is usual. None = never; then one
    token that became a thousand times as likely since it was sampled, as happens when rollout runs ahead of training,
    can outweigh its whole batch."""
    aggregation: Aggregation | None = None
    """None = the default of the kind."""
    kl_weight: NotNegativeReal = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_weight: NotNegativeReal = 0.0
    correction: CorrectionSettings = CorrectionSettings()

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: PolicyLoss | str) -> PolicyLoss | str:
        _known(kind, "loss", "my_losses.py:reinforce")
        return kind

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.settings and isinstance(self.kind, PolicyLoss):
            raise ValueError(
                f"settings are for a loss of your own; those of `{self.kind.value}` are keys of this table"
            )
        if self.kl_weight > 0 and self.kl_estimator is KlEstimator.K1:
            raise ValueError(
                "k1 cannot be a penalty in the loss: its gradient is 0 in expectation, whatever the distance. "
                "Use k2, which has the intended gradient, or k3"
            )
        if self.dual_clip is not None and isinstance(self.kind, PolicyLoss) and self.kind is not PolicyLoss.PPO:
            raise ValueError(f"dual_clip applies only to the loss `ppo`, not to `{self.kind.value}`")
        return self

    def factory(self) -> str:
        """Factory path of the loss function."""
        return LOSSES[self.kind] if isinstance(self.kind, PolicyLoss) else self.kind

    def ratio_bounds(self) -> RatioBounds:
        low, high = _CLIP[self.kind] if isinstance(self.kind, PolicyLoss) else (1.0, math.inf)
        return RatioBounds(
            1.0 - (low if self.clip_low is None else self.clip_low),
            1.0 + (high if self.clip_high is None else self.clip_high),
            math.inf if self.dual_clip is None else self.dual_clip,
        )

    def aggregated_by(self) -> Aggregation:
        if self.aggregation is not None:
            return self.aggregation
        return _AGGREGATION[self.kind] if isinstance(self.kind, PolicyLoss) else Aggregation.TOKEN_MEAN


LOSSES = {kind: f"rollart.algo.loss:{kind.value}" for kind in PolicyLoss}
"""Factory paths of the built-in losses."""
_CLIP = {
    PolicyLoss.PPO: (0.2, 0.2),
    PolicyLoss.GSPO: (3e-4, 4e-4),
    # No lower bound, as in the paper, which does not state the upper one: a weight of at most 5.
    PolicyLoss.CISPO: (1.0, 4.0),
}
_AGGREGATION = {
    PolicyLoss.PPO: Aggregation.TOKEN_MEAN,
    PolicyLoss.GSPO: Aggregation.SEQUENCE_MEAN,
    PolicyLoss.CISPO: Aggregation.TOKEN_MEAN,
}


class AdvantageKind(enum.Enum):
    """Baseline of a trajectory, a turn or a token; see `rollart.algo.advantage`."""

    GRPO = "grpo"
    """Mean of the group, divided by the standard deviation of the group."""
    DR_GRPO = "dr_grpo"
    """Mean of the group."""
    RLOO = "rloo"
    """Mean of the other members of the group (leave-one-out)."""
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    """Mean of the batch, divided by the standard deviation of the batch."""
    GIGPO = "gigpo"
    """Per turn: mean of the group, and of the group's turns that start in the same state."""
    GAE = "gae"
    """Per token: a value function learned beside the policy."""


class CriticSettings(Strict):
    """How the trainer learns values and computes advantages from them (`gae`)."""

    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    trace: Annotated[float, Field(ge=0, le=1)] = 0.95
    value_weight: PositiveReal = 0.5
    """Weight of the value loss relative to the policy loss."""
    value_learning_rate: PositiveReal | None = None
    """Learning rate of the value head; None = that of the policy."""
    whiten: bool = True
    """Normalise the advantages of a batch to mean 0 and standard deviation 1."""


class AlgorithmSettings(Strict):
    """How rewards become advantages and training steps. Parameters that the chosen advantage ignores are rejected."""

    advantage: Annotated[AdvantageKind | str, Field(union_mode="left_to_right")] = AdvantageKind.GRPO
    """A built-in advantage, or the factory path of one of your own: `my_advantages.py:ranked`."""
    advantage_settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords for an advantage of your own; those of the built-in ones are keys of this table."""
    group_baseline: bool | None = None
    """`reinforce_plus_plus`: subtract the group mean from rewards first; False unless set."""
    step_weight: NotNegativeReal | None = None
    """`gigpo`: weight of turn-level relative to episode-level advantages; 1 unless set."""
    normalise: bool | None = None
    """`gigpo`: divide by standard deviations; True unless set."""
    discount: Annotated[float, Field(gt=0, le=1)] | None = None
    """`gigpo`, per turn: 0.95 unless set. `gae`, per token: 1 unless set."""
    trace: Annotated[float, Field(ge=0, le=1)] | None = None
    """`gae`: λ; 0.95 unless set."""
    value_weight: PositiveReal | None = None
    """`gae`: weight of the value loss relative to the policy loss; 0.5 unless set."""
    value_learning_rate: PositiveReal | None = None
    """`gae`: learning rate of the value head; that of the trainer unless set."""
    whiten: bool | None = None
    """`gae`: normalise the advantages of a batch to mean 0 and standard deviation 1; True unless set."""
    filter_zero_variance: bool = False
    """Reject groups in which all rewards are equal and sample others instead (dynamic sampling)."""
    filter_limit: NotNegativeReal | None = None
    """Maximum number of rejected groups per batch, as a multiple of the task's share; beyond it groups without signal
    are accepted, so that a nearly solved task does not delay the others. Unset: until the deadline of the share."""
    epochs: Annotated[int, Field(gt=0)] = 1
    """Passes over each batch."""
    minibatches: Annotated[int, Field(gt=0)] = 1
    """Optimiser steps per epoch, each on a part of the trajectories."""
    loss: LossSettings = LossSettings()

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, advantage: AdvantageKind | str) -> AdvantageKind | str:
        _known(advantage, "advantage", "my_advantages.py:ranked")
        return advantage

    @model_validator(mode="after")
    def _no_settings_of_another(self) -> Self:
        if self.advantage_settings and isinstance(self.advantage, AdvantageKind):
            raise ValueError(
                f"advantage_settings are for an advantage of your own; those of {self.advantage.value!r} are keys of "
                "this table"
            )
        return self

    @property
    def advantage_name(self) -> str:
        """Its name, or its factory path."""
        return self.advantage.value if isinstance(self.advantage, AdvantageKind) else self.advantage

    def advantage_factory(self) -> tuple[str, dict[str, Any]]:
        """Factory path of the advantage function, and its keywords."""
        if not isinstance(self.advantage, AdvantageKind):
            return self.advantage, self.advantage_settings
        if self.advantage is AdvantageKind.GAE:
            return ADVANTAGES[self.advantage], {}  # its parameters are those of the trainer's critic
        own = [name for name, kinds in _USED_BY.items() if self.advantage in kinds]
        return ADVANTAGES[self.advantage], {name: value for name in own if (value := getattr(self, name)) is not None}

    def unused_parameters(self) -> dict[str, tuple[str, ...]]:
        """Parameters that are set but ignored by the chosen advantage, with the advantages that use them."""
        return {
            name: tuple(kind.value for kind in kinds)
            for name, kinds in _USED_BY.items()
            if getattr(self, name) is not None and self.advantage not in kinds
        }

    def critic(self) -> CriticSettings | None:
        """Settings of the value function; None if the advantage does not use one."""
        if self.advantage is not AdvantageKind.GAE:
            return None
        chosen = {name: getattr(self, name) for name in CriticSettings.model_fields}
        return CriticSettings(**{name: value for name, value in chosen.items() if value is not None})


ADVANTAGES = {
    kind: f"rollart.algo.estimators:{'learned_value' if kind is AdvantageKind.GAE else kind.value}"
    for kind in AdvantageKind
}
"""Factory paths of the built-in advantages."""
_USED_BY: dict[str, tuple[AdvantageKind, ...]] = {
    "group_baseline": (AdvantageKind.REINFORCE_PLUS_PLUS,),
    "step_weight": (AdvantageKind.GIGPO,),
    "normalise": (AdvantageKind.GIGPO,),
    "discount": (AdvantageKind.GIGPO, AdvantageKind.GAE),
    **{name: (AdvantageKind.GAE,) for name in CriticSettings.model_fields if name != "discount"},
}
