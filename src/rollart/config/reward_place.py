"""Where a reward function runs, and how it is called there."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rollart.config.base import Strict
from rollart.config.suggest import did_you_mean

THREADS = "threads"
PROCESSES = "processes"
ACTORS = "actors"
PLACES = (THREADS, PROCESSES, ACTORS)

LOCAL_SLOTS = 4
"""Concurrent calls of a function per reward worker, unless it is behind a URL."""
REMOTE_SLOTS = 64
MAX_BATCH = 64
_ONLY_REMOTE = ("secret", "secret_as", "hedge", "batch", "fallback")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RewardPlace(Strict):
    """Where a reward function runs. Keys after `price` are for functions behind a URL."""

    run: str = THREADS
    """`threads` of a reward worker; `processes`, where a call that exceeds its deadline is killed; `actors` of Ray, on
    any node; or the URL of a function that was deployed, `https://…`."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of concurrent calls (of requests, for a URL) per reward worker; by default 4, or 64 for a URL."""
    cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """CPUs that one actor reserves (on a cluster)."""
    price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Price of a second of one replica, in any currency, for the costs in metrics and report."""
    secret: str = ""
    """Name of the environment variable with the secret of a URL; it must be set where reward workers run."""
    secret_as: Literal["bearer", "signature"] = "bearer"
    """How the secret is used: sent as a bearer token, or kept and used to sign every request (HMAC-SHA256)."""
    hedge: bool = True
    """Send a request a second time if it is later than nearly all before it; at most one in ten. The first answer
    counts."""
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 1
    """Maximum number of calls in one request. Only calls that have to wait for a free slot are put together."""
    fallback: bool = False
    """Compute the reward in the reward worker while the URL is out of reach; by default calls wait until it is back."""

    def problem(self) -> tuple[str, str] | None:
        """A key that cannot be meant, and why; checked by the task, which knows the whole path of the key."""
        if self.remote:
            why = _problem_of_url(self.run)
            if why:
                return "run", why
        elif self.run not in PLACES:
            near = did_you_mean(self.run, PLACES)
            return "run", f"{self.run!r} is not a place{near}; use {', '.join(PLACES)}, or a URL"
        for key in () if self.remote else _ONLY_REMOTE:
            if getattr(self, key) != RewardPlace.model_fields[key].default:
                return key, f"is for functions behind a URL, and run is {self.run!r}; remove it"
        if self.cpus != 1.0 and self.run != ACTORS:
            return "cpus", f"is for actors, and run is {self.run!r}; remove it"
        if self.secret and not _VARIABLE.fullmatch(self.secret):
            return "secret", "must be the name of an environment variable, never the secret itself"
        return None

    @property
    def remote(self) -> bool:
        """Whether it is behind a URL."""
        return self.run.startswith(("https://", "http://"))

    @property
    def concurrency(self) -> int:
        """Concurrent calls, or requests, per reward worker."""
        return self.slots or (REMOTE_SLOTS if self.remote else LOCAL_SLOTS)


def _problem_of_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError as error:
        return f"is not a URL ({error}); write it as https://host/path"
    if not host:
        return f"{url!r} names no host; write it as https://host/path"
    if parts.username is not None or parts.password is not None:
        return (
            "has a user or a password in its URL, which would be stored with the config; put the secret into an "
            "environment variable and name it as `secret`"
        )
    return "has a part after '#', which is never sent; remove it" if parts.fragment else ""
