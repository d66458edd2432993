"""Trial of a user's advantage and loss functions before a run: each is called once, with made-up numbers.

    python -m rollart.app.algorithm_trial '{"kind": "my_losses.py:reinforce"}'

tries a loss in a process of its own, because the controller does not load torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from rollart.config.algorithm import AdvantageKind, LossSettings, PolicyLoss
from rollart.config.schema import RunConfig
from rollart.ports.algorithm import advantage_of, surrogate_of
from rollart.ports.factory import SESSION
from rollart.ports.import_paths import project_paths
from rollart.types.credit import Group, Member
from rollart.types.errors import AdvantageFailed, ConfigError, RequestError
from rollart.types.ids import GroupId, TrajectoryId

ADVANTAGE = "algorithm.advantage"
LOSS = "algorithm.loss.kind"
TRIAL_S = 300.0
"""Limit of a trial in a process of its own, which loads torch."""
MADE_UP = "It was called with made-up numbers, before the run"


def check_algorithm(config: RunConfig) -> None:
    """Load and try what `[algorithm]` names; raises `ConfigError`."""
    advantage, loss = advantage_of(config.algorithm), config.algorithm.loss
    if not isinstance(config.algorithm.advantage, AdvantageKind):
        batch = made_up_batch(list(config.tasks), config.batch.group_size)
        try:
            first, again = advantage.per_turn(batch), advantage.per_turn(batch)
        except AdvantageFailed as error:
            raise ConfigError(ADVANTAGE, f"{error}. {MADE_UP}") from error
        if first != again:
            raise ConfigError(
                ADVANTAGE,
                f"{advantage.name} returned different advantages for the same batch; it must depend on nothing else. "
                "Draw random numbers from a generator that you seed in the function",
            )
    if isinstance(loss.kind, PolicyLoss):
        return
    try:
        if loss.kind.startswith(f"{SESSION}:"):
            try_loss(loss)
        else:
            _try_elsewhere(loss)
    except RequestError as error:
        raise ConfigError(LOSS, str(error)) from error


def made_up_batch(tasks: Sequence[str], size: int) -> list[Group]:
    """Two groups per task: one with different rewards and numbers of turns, and one of equal trajectories."""
    batch: list[Group] = []
    for task in tasks:
        for mixed in (True, False):
            members = []
            for number in range(size):
                turns = 1 + number % 2 if mixed else 1
                reward = float(number % 2) if mixed else 1.0
                member = Member(
                    trajectory=TrajectoryId(len(batch) * size + number),
                    reward=reward,
                    turn_rewards=(0.0,) * (turns - 1) + (reward,),
                    turn_tokens=(3,) * turns,
                    states=tuple(bytes([turn] * 8) for turn in range(turns)),
                )
                members.append(member)
            batch.append(Group(id=GroupId(len(batch)), task=task, members=tuple(members)))
    return batch


def try_loss(settings: LossSettings) -> None:
    """Call the loss with made-up tokens and take its gradient; raises `RequestError`. Loads torch."""
    import torch

    from rollart.algo.loss import policy_loss
    from rollart.algo.packed import PackedBatch
    from rollart.algo.surrogate import BadLoss

    function = surrogate_of(settings)
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0], requires_grad=True)
    batch = PackedBatch(
        logprobs=logprobs,
        behaviour=torch.tensor([-1.1, -0.5, -1.9, -0.2, -2.5]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0]),
        sequence=torch.tensor([0, 0, 1, 1, 2]),
        sequences=3,
        total_tokens=5.0,
        total_sequences=3.0,
        proximal=torch.tensor([-1.1, -0.4, -2.0, -0.1, -2.9]),
        reference=torch.tensor([-1.0, -0.6, -2.1, -0.2, -2.8]),
        entropy=torch.full((5,), 0.5, requires_grad=True),
    )
    try:
        loss, _ = policy_loss(settings, batch, function)
    except BadLoss as error:
        raise RequestError(f"{error}. {MADE_UP}") from error
    except Exception as error:  # the boundary of user code: its errors are attributed to it
        raise RequestError(f"the loss {settings.kind} raised {type(error).__name__}: {error}. {MADE_UP}") from error
    (gradient,) = torch.autograd.grad(loss, logprobs)
    if not (loss.isfinite() and gradient.isfinite().all()):
        what = "a loss" if not loss.isfinite() else "a gradient"
        raise RequestError(f"the loss {settings.kind} has {what} that is not finite. {MADE_UP}")


def _try_elsewhere(settings: LossSettings) -> None:
    order = [sys.executable, "-m", "rollart.app.algorithm_trial", settings.model_dump_json()]
    paths = {"PYTHONPATH": os.pathsep.join(path for path in project_paths() if path)}
    try:
        tried = subprocess.run(
            order,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            env=os.environ | paths,
            timeout=TRIAL_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"the loss {settings.kind} took longer than {TRIAL_S:g} s. {MADE_UP}") from error
    if tried.returncode:
        lines = tried.stderr.strip().splitlines()
        raise RequestError(lines[-1] if lines else f"trying the loss {settings.kind} failed ({tried.returncode})")


def _main(order: str) -> None:
    try:
        try_loss(LossSettings.model_validate(json.loads(order)))
    except RequestError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main(sys.argv[1])
