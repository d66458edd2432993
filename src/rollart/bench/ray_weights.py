"""How fast a weight version reaches other nodes of a Ray cluster, compared with one plain TCP stream between two."""

import os
from dataclasses import dataclass
from statistics import median

VERSION_BYTES = 500_000_000
PAIRS = 5


@dataclass(frozen=True)
class WeightTransfer:
    """Interleaved measurements, in seconds."""

    nbytes: int
    readers: int
    version_s: tuple[float, ...]
    """From the start of a publication until every reader's node has the version."""
    tcp_s: tuple[float, ...]
    """A plain stream of as many bytes between two of the nodes."""

    @property
    def over_tcp(self) -> float:
        """Median of the rate at which the version reaches all readers, over that of the stream.

        >>> WeightTransfer(10, 2, version_s=(2.0, 4.0, 2.0), tcp_s=(1.0, 1.0, 1.0)).over_tcp
        0.5
        """
        return median(tcp / version for version, tcp in zip(self.version_s, self.tcp_s, strict=True))


def measure_weights(*, nbytes: int = VERSION_BYTES, pairs: int = PAIRS, readers: int = 2) -> WeightTransfer:
    """Measure on the cluster that this process is connected to; it has a node for the publisher and each reader."""
    from rollart.distributed.weight_probe import measure  # here: other benchmarks need no Ray

    measured = measure(f"bench-{os.getpid()}", nbytes, pairs, readers)
    return WeightTransfer(nbytes, readers, tuple(version for version, _ in measured), tuple(tcp for _, tcp in measured))
