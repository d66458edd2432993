"""One measurement of `rollart bench ray`, in a process of its own: a process can use the token of one Ray only.

`python -m rollart.bench.ray_side ORDER.json` carries out a run, or measures weights, and writes `result.json` beside.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from rollart.app.running import RuntimeKind, carry_out, new_run


def main(order_file: Path) -> None:
    order: dict[str, Any] = msgspec.json.decode(order_file.read_bytes())
    result: dict[str, Any] = {}
    if order["kind"] == "weights":
        result = _weights(order["address"])
    else:
        carry_out(new_run(order["run"]), RuntimeKind.RAY, Path(order["folder"]), address=order["address"])
    order_file.with_name("result.json").write_bytes(msgspec.json.encode(result))


def _weights(address: str) -> dict[str, Any]:
    from rollart.bench.ray_weights import measure_weights
    from rollart.distributed.ray_cluster import RayCluster

    with RayCluster(address):
        measured = measure_weights(readers=1)
    return {"weight_over_tcp": measured.over_tcp, "version_s": measured.version_s, "tcp_s": measured.tcp_s}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
