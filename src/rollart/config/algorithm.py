"""What is optimised, and how. The formulas are in `rollart.algo`; this part imports without torch.

Defaults that the kinds do not share (clip range, aggregation, discount) are those of the papers, and hold unless set.
"""

import enum
import math
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from rollart.config.base import Strict

NotNegativeReal = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PolicyLoss(enum.Enum):
    """What stands before the gradient of a token's log-probability."""

    PPO = "ppo"
    """The ratio of the token, clipped: the objective of PPO, GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++ and GiGPO."""
    GSPO = "gspo"
    """The length-normalised ratio of its sequence, clipped."""
    CISPO = "cispo"
    """The ratio of the token as a constant with a cap: no token is ever without a gradient."""


class Aggregation(enum.Enum):
    """How the terms of tokens become one number."""

    TOKEN_MEAN = "token_mean"
    """Every token weighs the same, so long sequences weigh more (DAPO)."""
    SEQUENCE_MEAN = "sequence_mean"
    """The mean of the sequences' means: every sequence weighs the same (GRPO, GSPO)."""


class KlEstimator(enum.Enum):
    """How the divergence from the reference is estimated from one token; see `rollart.algo.loss.kl_estimate`."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class CorrectionKind(enum.Enum):
    """What is done with the importance weight of a token that another policy sampled."""

    NONE = "none"
    """Every weight is 1."""
    TRUNCATE = "truncate"
    """A weight above the cap becomes the cap (TIS)."""
    MASK = "mask"
    """A weight above the cap or below the floor becomes 0 (MIS, IcePop)."""


class CorrectionLevel(enum.Enum):
    """What the weight is the ratio of."""

    TOKEN = "token"
    """The token: low variance, blind to how likely its prefix was."""
    SEQUENCE = "sequence"
    """All the sequence's sampled tokens, their ratios multiplied: exact, and useless where sequences are long."""
    GEOMETRIC = "geometric"
    """The geometric mean over the sequence, which does not grow with its length: to find sequences that are off."""


class CorrectionSettings(Strict):
    """How tokens of earlier versions, or of an engine that computes differently, are corrected for."""

    kind: CorrectionKind = CorrectionKind.NONE
    level: CorrectionLevel = CorrectionLevel.TOKEN
    cap: PositiveReal = 2.0
    floor: NotNegativeReal = 0.0
    """Of `mask` only. IcePop uses 0.5 with a cap of 5."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.floor > 0 and self.kind is not CorrectionKind.MASK:
            raise ValueError(f"a floor belongs to the correction `mask`, not to `{self.kind.value}`")
        if self.floor >= self.cap:
            raise ValueError(f"the floor ({self.floor:g}) must be below the cap ({self.cap:g})")
        if self.cap < 1:
            raise ValueError(f"a cap of {self.cap:g} would cut the weight 1 of tokens that need no correction")
        if self.floor > 1:
            raise ValueError(f"a floor of {self.floor:g} would mask the weight 1 of tokens that need no correction")
        return self


class RatioBounds(NamedTuple):
    """Beyond which ratios a token is no longer followed."""

    low: float
    high: float
    """For a token that should become more likely."""
    dual: float
    """For one that should become less likely."""


class LossSettings(Strict):
    """The loss of the policy."""

    kind: PolicyLoss = PolicyLoss.PPO
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ratios below 1 − clip_low are clipped; 1 = never. None = the usual one of the kind."""
    clip_high: PositiveReal | None = None
    """Ratios above 1 + clip_high are clipped. None = the usual one of the kind; 0.28 with `ppo` is DAPO's."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """`ppo`: tokens that should become less likely are clipped too, where their ratio is above this; 3 is usual. None =
    never; then one that became a thousand times as likely since it was sampled, as happens where rollout is ahead of
    training, outweighs its whole batch."""
    aggregation: Aggregation | None = None
    """None = the usual one of the kind."""
    kl_weight: NotNegativeReal = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_weight: NotNegativeReal = 0.0
    correction: CorrectionSettings = CorrectionSettings()

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.kl_weight > 0 and self.kl_estimator is KlEstimator.K1:
            raise ValueError(
                "k1 cannot be a penalty in the loss: its gradient is 0 in expectation, whatever the distance. "
                "Use k2, which has the gradient that is meant, or k3"
            )
        if self.dual_clip is not None and self.kind is not PolicyLoss.PPO:
            raise ValueError(f"a dual_clip belongs to the loss `ppo`, not to `{self.kind.value}`")
        return self

    def ratio_bounds(self) -> RatioBounds:
        low, high = _CLIP[self.kind]
        return RatioBounds(
            1.0 - (low if self.clip_low is None else self.clip_low),
            1.0 + (high if self.clip_high is None else self.clip_high),
            math.inf if self.dual_clip is None else self.dual_clip,
        )

    def aggregated_by(self) -> Aggregation:
        return _AGGREGATION[self.kind] if self.aggregation is None else self.aggregation


_CLIP = {
    PolicyLoss.PPO: (0.2, 0.2),
    PolicyLoss.GSPO: (3e-4, 4e-4),
    # No lower bound, as in the paper, which does not give the upper one: a weight of at most 5.
    PolicyLoss.CISPO: (1.0, 4.0),
}
_AGGREGATION = {
    PolicyLoss.PPO: Aggregation.TOKEN_MEAN,
    PolicyLoss.GSPO: Aggregation.SEQUENCE_MEAN,
    PolicyLoss.CISPO: Aggregation.TOKEN_MEAN,
}


class AdvantageKind(enum.Enum):
    """What a trajectory, a turn or a token is compared with; see `rollart.algo.advantage`."""

    GRPO = "grpo"
    """The mean of its group, in deviations of the group."""
    DR_GRPO = "dr_grpo"
    """The mean of its group."""
    RLOO = "rloo"
    """The mean of the others of its group."""
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    """The mean of the batch, in deviations of the batch."""
    GIGPO = "gigpo"
    """Per turn: the mean of its group, and of the turns of the group that start in the same state."""
    GAE = "gae"
    """Per token: a value that the trainer learns beside the policy."""


class CriticSettings(Strict):
    """How the trainer learns values, and makes advantages of them (`gae`)."""

    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    trace: Annotated[float, Field(ge=0, le=1)] = 0.95
    value_weight: PositiveReal = 0.5
    """Of the value loss, beside that of the policy."""
    value_learning_rate: PositiveReal | None = None
    """Of the value head; None = that of the policy."""
    whiten: bool = True
    """Advantages of a batch get mean 0 and deviation 1."""


class AlgorithmSettings(Strict):
    """How rewards become advantages, and advantages steps. What the chosen advantage has no use for is refused."""

    advantage: AdvantageKind = AdvantageKind.GRPO
    group_baseline: bool | None = None
    """`reinforce_plus_plus`: take the mean of its group from a reward first; False unless set."""
    step_weight: NotNegativeReal | None = None
    """`gigpo`: what turns weigh beside episodes; 1 unless set."""
    normalise: bool | None = None
    """`gigpo`: divide by deviations; True unless set."""
    discount: Annotated[float, Field(gt=0, le=1)] | None = None
    """`gigpo`, per turn: 0.95 unless set. `gae`, per token: 1 unless set."""
    trace: Annotated[float, Field(ge=0, le=1)] | None = None
    """`gae`: λ; 0.95 unless set."""
    value_weight: PositiveReal | None = None
    """`gae`: of the value loss beside that of the policy; 0.5 unless set."""
    value_learning_rate: PositiveReal | None = None
    """`gae`: of the value head; that of the trainer unless set."""
    whiten: bool | None = None
    """`gae`: advantages of a batch get mean 0 and deviation 1; True unless set."""
    filter_zero_variance: bool = False
    """Groups in which all rewards are equal are not trained, and others are sampled instead (dynamic sampling)."""
    filter_limit: NotNegativeReal | None = None
    """At most so many times a task's share is filtered for one batch; then groups without signal fill it too, so that
    a task that is nearly solved does not hold up the others. Unset: until the deadline of the share."""
    epochs: Annotated[int, Field(gt=0)] = 1
    """How often a batch is trained on."""
    minibatches: Annotated[int, Field(gt=0)] = 1
    """Optimiser steps per epoch, each on its part of the trajectories."""
    loss: LossSettings = LossSettings()

    def useless(self) -> dict[str, tuple[str, ...]]:
        """Parameters that are set and that the chosen advantage has no use for, with the advantages that do."""
        return {
            name: tuple(kind.value for kind in kinds)
            for name, kinds in _USED_BY.items()
            if getattr(self, name) is not None and self.advantage not in kinds
        }

    def critic(self) -> CriticSettings | None:
        """What the trainer needs to learn values; None where no advantage is made of them."""
        if self.advantage is not AdvantageKind.GAE:
            return None
        chosen = {name: getattr(self, name) for name in CriticSettings.model_fields}
        return CriticSettings(**{name: value for name, value in chosen.items() if value is not None})


_USED_BY: dict[str, tuple[AdvantageKind, ...]] = {
    "group_baseline": (AdvantageKind.REINFORCE_PLUS_PLUS,),
    "step_weight": (AdvantageKind.GIGPO,),
    "normalise": (AdvantageKind.GIGPO,),
    "discount": (AdvantageKind.GIGPO, AdvantageKind.GAE),
    **{name: (AdvantageKind.GAE,) for name in CriticSettings.model_fields if name != "discount"},
}
