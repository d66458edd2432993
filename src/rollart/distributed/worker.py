"""Declarations of `Worker` methods: the ranks that execute them, preferred hardware, functions behind a URL.

    @register(mode="execute_all")                                    see `cluster`
    @hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
    def generate(self, prompts, tag_name="default"): …

A method with `hw_mapping` has a parameter `tag_name`. A call goes to the ranks on the class of its tag, by `route`:

    ranks on the class of the tag             these
    none there                                those on the class of `default`, with the reason
    none there either                         all ranks, with the reason

    >>> affinity = {"FrozenLake": "H800", "default": "H20"}
    >>> route(affinity, "FrozenLake", {0: "H800", 1: "H20"})
    Route(tag='FrozenLake', wanted='H800', ranks=(0,), why='')
    >>> route(affinity, "GEM-math", {0: "H800", 1: "H20"})
    Route(tag='GEM-math', wanted='H20', ranks=(1,), why='')
    >>> route(affinity, "FrozenLake", {1: "H20", 2: "H20"})
    Route(tag='FrozenLake', wanted='H800', ranks=(1, 2), why='no rank on H800')
"""

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

from rollart.types.errors import RequestError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT = "default"
TAG = "tag_name"
_REGISTERED = "__rollart_registered__"
_AFFINITY = "__rollart_affinity__"
_SERVERLESS = "__rollart_serverless__"


class Mode(StrEnum):
    """Which ranks execute a method, and with what."""

    EXECUTE_ALL = "execute_all"
    EXECUTE_RANK_ZERO = "execute_rank_zero"
    SHARD = "shard"


class Affinity(NamedTuple):
    """Preferred hardware of a method's calls."""

    classes: Mapping[str, str]
    """By tag, with one for `default`."""
    signature: inspect.Signature

    def tag_of(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> str:
        """The tag of a call with these arguments."""
        bound = self.signature.bind(None, *args, **named)
        bound.apply_defaults()
        return str(bound.arguments[TAG])


class Serverless(NamedTuple):
    """A worker attribute that is replaced by a function behind a URL."""

    attribute: str
    url: str
    options: Mapping[str, Any]


class Registered(NamedTuple):
    """How a cluster calls a method of its workers."""

    mode: Mode
    beside: bool = False
    affinity: Affinity | None = None


class Route(NamedTuple):
    """Where a call with a tag goes."""

    tag: str
    wanted: str
    """Hardware class of the tag."""
    ranks: tuple[int, ...]
    why: str
    """Reason if the ranks are not on that class; empty if they are."""


def register(mode: Mode | str = Mode.EXECUTE_ALL, *, beside: bool = False) -> Callable[[F], F]:
    """Make a method of a `Worker` callable on its `Cluster`. With `beside` it may run while another method runs."""

    def mark(method: F) -> F:
        setattr(method, _REGISTERED, Registered(Mode(mode), beside))
        return method

    return mark


def hw_mapping(hw_affinity: Mapping[str, str]) -> Callable[[F], F]:
    """Send calls of a `Worker` method to the ranks on the hardware class of their tag.

    Alone it registers the method with mode `shard`: lists are split over the ranks that a call goes to.
    """
    if DEFAULT not in hw_affinity:
        raise RequestError(f"hw_mapping has no class for {DEFAULT!r}, which tags without a class of their own have")

    def mark(method: F) -> F:
        signature = inspect.signature(method)
        if TAG not in signature.parameters:
            raise RequestError(f"{method.__qualname__} has hw_mapping and no parameter {TAG}; add {TAG}={DEFAULT!r}")
        setattr(method, _AFFINITY, Affinity(dict(hw_affinity), signature))
        return method

    return mark


def register_serverless(*, attribute: str, serverless_url: str, **options: Any) -> Callable[[F], F]:
    """Point an attribute of a `Worker` at a function behind a URL, for the method that calls it.

        @register_serverless(attribute="judge", serverless_url="https://fn.example/judge", secret="JUDGE_SECRET")
        def compute_rewards(self, transcripts):
            return self.judge(transcripts)

    The cluster sets the attribute on every rank, after `__init__`: what that assigned, such as the function itself, is
    for use without a cluster. `options` are those of `backends.rewards.remote_function.RemoteFunction`. Alone it
    registers the method with mode `shard`: lists are split over the ranks.
    """
    if not serverless_url.startswith(("https://", "http://")):
        raise RequestError(f"serverless_url {serverless_url!r} is not a URL; write it as https://host/path")
    if not attribute.isidentifier():
        raise RequestError(f"{attribute!r} cannot be the name of an attribute")

    def mark(method: F) -> F:
        setattr(method, _SERVERLESS, Serverless(attribute, serverless_url, options))
        return method

    return mark


class Worker:
    """One rank of a cluster. Derive from it; these attributes are set before `__init__`."""

    rank: int
    ranks: int
    """Number of ranks, those before the cluster's first one included."""
    address: str
    """Address of its node on the cluster's network."""
    node: str
    """Id of its node."""
    resource: str
    """Hardware class that it is bound to; empty if none was asked for."""

    registered: ClassVar[Mapping[str, Registered]] = {}
    serverless: ClassVar[Mapping[str, Serverless]] = {}
    """By attribute."""

    def __init_subclass__(cls) -> None:
        found_serverless = [getattr(method, _SERVERLESS, None) for method in vars(cls).values()]
        cls.serverless = {**cls.serverless, **{found.attribute: found for found in found_serverless if found}}
        own = {name: _declared(method) for name, method in vars(cls).items()}
        cls.registered = {**cls.registered, **{name: found for name, found in own.items() if found is not None}}


def _declared(method: Any) -> Registered | None:
    found: Registered | None = getattr(method, _REGISTERED, None)
    affinity: Affinity | None = getattr(method, _AFFINITY, None)
    if affinity is None and not hasattr(method, _SERVERLESS):
        return found
    return (found or Registered(Mode.SHARD))._replace(affinity=affinity)


def route(classes: Mapping[str, str], tag: str, resources: Mapping[int, str]) -> Route:
    """The ranks for a call, among those that live, whose hardware classes are `resources`."""
    wanted = classes.get(tag, classes[DEFAULT])
    why = ""
    for resource in dict.fromkeys((wanted, classes[DEFAULT])):
        ranks = tuple(rank for rank, own in resources.items() if own == resource)
        if ranks:
            return Route(tag, wanted, ranks, why)
        why += f"{' and none' if why else 'no rank'} on {resource}"
    return Route(tag, wanted, tuple(resources), why)
