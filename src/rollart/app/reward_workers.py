"""The reward workers of a run: where each function runs, by its config."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from rollart.config.reward_place import ACTORS, PROCESSES, RewardPlace
from rollart.config.schema import RunConfig
from rollart.config.tasks import RewardSettings
from rollart.control.fleet import WorkerSpec
from rollart.control.rewards import POOL
from rollart.ports.factory import SESSION, load
from rollart.ports.reward import RewardKind, kind_of
from rollart.types.errors import ConfigError, RequestError
from rollart.types.messages import Role
from rollart.types.placement import Needs

THREAD_HOST = "rollart.backends.rewards.host:RewardHost"
REPLICA_HOST = "rollart.backends.rewards.replica_host:ReplicaHost"
REMOTE_HOST = "rollart.backends.rewards.remote_host:RemoteHost"
REWARD_CPUS = 0.25
"""CPUs that a reward worker reserves on a cluster: most of the time it waits."""


class _Kind(NamedTuple):
    """Rewards of the same kind share workers."""

    function: str
    place: RewardPlace


def check_function(key: str, reward: RewardSettings) -> None:
    """Refuse a function that cannot be loaded, or does not say what it sees."""
    if not reward.function and reward.remote:
        return
    if not reward.function:
        raise ConfigError(key, 'is missing; name a function such as "my_rewards.py:correct"')
    try:
        kind_of(load(reward.function), reward.function)
    except RequestError as error:
        raise ConfigError(key, str(error)) from error


def sees_group(_: str, reward: RewardSettings) -> bool:
    """Whether the function of a reward sees the whole group."""
    return bool(reward.function) and kind_of(load(reward.function), reward.function) is RewardKind.GROUP


def check_places(config: RunConfig, *, processes: bool, local: bool) -> None:
    """Refuse places that this way of running does not have.

    `processes`: workers run in their own processes, on Ray. `local`: all of them on this machine.
    """
    for name, task in config.tasks.items():
        for index, reward in enumerate(task.rewards):
            key = f"tasks.{name}.rewards.{index}"
            if reward.run == ACTORS and not processes:
                raise ConfigError(
                    f"{key}.run",
                    "actors are Ray's, and workers are threads of the controller here; use --runtime ray, or run = "
                    '"processes", where calls are killed at their deadlines too',
                )
            if reward.run == PROCESSES and reward.function.startswith(f"{SESSION}:"):
                raise ConfigError(
                    f"{key}.run",
                    f"{reward.function.partition(':')[2]} was defined in a notebook or an interactive session, where "
                    "other processes cannot find it; write it to a file and import it",
                )
            if local and reward.secret and not os.environ.get(reward.secret):
                raise ConfigError(f"{key}.secret", f"the environment variable {reward.secret} is not set; set it")


def secrets_of(config: RunConfig) -> tuple[str, ...]:
    """Secrets of reward functions that this process knows."""
    names = [reward.secret for task in config.tasks.values() for reward in task.rewards]
    return tuple(dict.fromkeys(value for name in names if name and (value := os.environ.get(name))))


def reward_workers(config: RunConfig, needs_of: Callable[[float], Needs]) -> list[WorkerSpec]:
    """Rewards with the same function in the same place share its workers, named after the first of their tasks.

    `needs_of` gives what a worker with so many CPUs reserves.
    """
    kinds: dict[_Kind, list[str]] = {}
    for name, task in config.tasks.items():
        for reward in task.all_rewards:
            place = RewardPlace(**{key: getattr(reward, key) for key in RewardPlace.model_fields})
            kinds.setdefault(_Kind(reward.function, place), []).append(f"{name}/{reward.label}")
    places: Counter[str] = Counter()
    specs = []
    for kind, rewards in kinds.items():
        first = rewards[0].rpartition("/")[0]
        factory, settings = _settings(kind, needs_of)
        for _ in range(config.reward_workers):
            name = f"reward/{first}/{places[first]}"
            own = {**settings, "rewards": tuple(rewards)}
            specs.append(WorkerSpec(name, Role.REWARD, POOL, factory, own, needs=needs_of(REWARD_CPUS)))
            places[first] += 1
    return specs


def _settings(kind: _Kind, needs_of: Callable[[float], Needs]) -> tuple[str, dict[str, Any]]:
    """Factory path of a worker, and its settings."""
    place = kind.place
    common = {"function": kind.function, "slots": place.concurrency, "price": place.price}
    if place.remote:
        keys = ("batch", "hedge", "fallback", "secret", "secret_as")
        return REMOTE_HOST, common | {"url": place.run} | {key: getattr(place, key) for key in keys}
    if place.run == ACTORS:
        from rollart.distributed.ray_replicas import RayReplicas  # here: other runs need no Ray

        return REPLICA_HOST, common | {"starter": RayReplicas(needs_of(place.cpus))}
    return (REPLICA_HOST if place.run == PROCESSES else THREAD_HOST), common
