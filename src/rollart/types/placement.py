"""What workers need of a machine, and what the machines of a cluster offer."""

import msgspec

Labels = dict[str, str]

ACCELERATOR = "ray.io/accelerator-type"
"""Label of the accelerator of a node, such as H800. Ray sets it where it detects one."""
NODE_ID = "ray.io/node-id"
HEAD = "node:__internal_head__"
"""Resource that Ray gives to the head of a cluster only."""
ANYWHERE: Labels = {}


class Needs(msgspec.Struct, frozen=True):
    """What a worker needs of its node. The default needs nothing, which fits everywhere."""

    gpus: float = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    labels: Labels = {}
    """Labels that the node must have, with these values."""
    fallback: tuple[Labels, ...] = ()
    """Labels that will do, in this order, while no node with the preferred ones has room; `ANYWHERE` for any node."""
    pool: str = ""
    """The pool that asks, for messages."""

    @property
    def resources(self) -> dict[str, float]:
        """Under the names that Ray has for them."""
        named = {"GPU": float(self.gpus), "CPU": self.cpus, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in named.items() if amount}

    def __str__(self) -> str:
        parts = [f"{self.gpus:g} GPU" + ("s" if self.gpus > 1 else "")] if self.gpus else []
        parts += [f"{self.cpus:g} CPUs" if self.cpus != 1 else "1 CPU"] if self.cpus else []
        parts += [f"{self.memory_bytes / 2**30:.3g} GiB"] if self.memory_bytes else []
        labels = ", ".join(f"{name}={value}" for name, value in self.labels.items())
        asked = ", ".join(parts) or "nothing"
        return f"{asked} on a node with {labels}" if labels else asked


NOTHING = Needs()


class Node(msgspec.Struct, frozen=True):
    """A node of a cluster; in trials several nodes share a machine."""

    id: str
    address: str
    labels: Labels
    total: dict[str, float]
    """Amount of every resource, under the names that Ray has for them."""
    free: dict[str, float]
    draining: bool = False
    """It will leave: nothing new is placed there."""

    @property
    def is_head(self) -> bool:
        return HEAD in self.total

    @property
    def name(self) -> str:
        """For people: what it is, and the beginning of its id."""
        kind = self.labels.get(ACCELERATOR) or ("gpu" if self.total.get("GPU") else "cpu")
        return f"{kind} {self.address} {self.id[:6]}"
