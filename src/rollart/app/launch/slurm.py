"""A run as a batch script for Slurm: one component of a heterogeneous job per group of nodes.

    batch script, on the first machine      head of the cluster (reserves nothing), `rollart train`
    srun, one step per component            a Ray node on every machine, with its labels and resources

The folder of the run must be on a disk that all machines share, because a requeued job may begin on another one. The
token is in a file beside it that only this user can read. Two minutes before its time is up, or when it is preempted,
the job drains: steps finish, the trainer saves; then it is requeued, and resumes the run.

    notice ──► TERM to the batch script ──► `scancel --signal=TERM` to all steps ──► Ray nodes drain and end
           ──► `rollart train` is interrupted ──► `scontrol requeue`
"""

import shlex
from collections.abc import Mapping, Sequence

import msgspec

from rollart.app.launch.groups import NodeGroup, dns_name
from rollart.config.schema import RunConfig
from rollart.distributed.node_environment import DRAIN_VARIABLE
from rollart.types.errors import RequestError
from rollart.types.placement import ACCELERATOR

STOP_S = 60
"""Time to end after a drain."""
WAIT_S = 900
"""How long machines of an allocation may take to start their Ray node."""
RUN_SCRIPT = r"""
set -euo pipefail
mkdir -p "$(dirname "$run")"
head=
train=
# shellcheck disable=SC2317,SC2329  # called by a trap
finish() {  # Slurm ends the steps of a job whose script is done
    rm -f "${RAY_AUTH_TOKEN_PATH:-}"
    if [ -n "$head" ] && kill -TERM "$head" 2> /dev/null; then wait "$head" || true; fi
}
trap finish EXIT

# The token of this cluster: in a file of this user alone, and never on a command line.
RAY_AUTH_TOKEN_PATH=$(umask 077; mktemp "$(dirname "$run")/.token-XXXXXXXX")
export RAY_AUTH_TOKEN_PATH
"$python" -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH"

# The address of this machine on the network that leads to the others.
other=$(scontrol show hostnames "$last_nodes" | tail -n 1)
if [ "$other" = "$(hostname)" ] || [ "$other" = "$(hostname -s)" ]; then other=127.0.0.1; fi
address=$("$python" -m rollart.distributed.one_interface "$other")
port=$((20000 + SLURM_JOB_ID % 10000))
cluster=$address:$port

nodes=()
leaving=0
# shellcheck disable=SC2317,SC2329  # called by a trap
leave() {
    trap '' TERM
    leaving=1
    echo "rollart: the allocation ends; its nodes drain" >&2
    scancel --signal=TERM "$SLURM_JOB_ID"  # to the steps only: every Ray node drains
}
trap leave TERM

"$python" -m rollart.distributed.ray_start --head --port="$port" --node-ip-address="$address" --num-cpus=0 \
    --num-gpus=0 --temp-dir="/tmp/ray-$SLURM_JOB_ID" --disable-usage-stats --block &
head=$!
# Two Ray nodes of one machine must not start at the same time.
"$python" -m rollart cluster wait 1 --address "$cluster" --timeout-s "$wait_s"
start_nodes() {  # options of srun, then --, then those of a Ray node
    local options=()
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    srun "${options[@]}" --kill-on-bad-exit=0 "$python" -m rollart.distributed.ray_start --address="$cluster" \
        --node-ip-address=auto --disable-usage-stats --block "$@" &
    nodes+=($!)
}
"""
TRAIN_SCRIPT = r"""
# In the background, so that a notice is heard at once.
status=0
"$python" -m rollart cluster wait "$number" --address "$cluster" --timeout-s "$wait_s" &
wait $! || status=$?
if [ "$leaving" = 0 ] && [ "$status" = 0 ]; then
    "$python" -m rollart train "$config" --out "$run" --continue --address "$cluster" &
    train=$!
    wait "$train" || status=$?
fi
if [ "$leaving" = 1 ]; then
    for node in "${nodes[@]}"; do wait "$node" || true; done  # until they are idle, or their deadline
    if [ -z "$train" ] || kill -TERM "$train" 2> /dev/null; then
        [ -z "$train" ] || wait "$train" || true
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    status=0
    wait "$train" || status=$?  # it was done meanwhile
fi
exit "$status"
"""


class SlurmSettings(msgspec.Struct, frozen=True):
    """What a config does not say."""

    name: str
    config: str
    """Absolute path."""
    run: str
    """Absolute path on a shared disk."""
    folder: str
    """Absolute path of the folder with the user's code."""
    python: str
    """Path of the interpreter on every machine."""
    time: str = ""
    options: Mapping[str, Sequence[str]] = {}
    """Further options of `sbatch` by pool; those of pool "" are for all."""


def script(config: RunConfig, groups: Sequence[NodeGroup], settings: SlurmSettings) -> str:
    """The batch script."""
    names = [group.name for group in groups]
    for pool in settings.options:
        if pool and pool not in names:
            raise RequestError(f"--sbatch {pool}: there is no such group of nodes; groups are {', '.join(names)}")
    drain_s = round(config.deadlines.drain_s)
    nodes = sum(group.nodes for group in groups)
    last = f"SLURM_JOB_NODELIST_HET_GROUP_{len(groups) - 1}" if len(groups) > 1 else "SLURM_JOB_NODELIST"
    values = {
        "python": settings.python,
        "config": settings.config,
        "run": settings.run,
        "number": str(nodes + 1),
        "wait_s": str(WAIT_S),
    }
    return "\n".join(
        [
            "#!/bin/bash",
            *_header(groups, settings, drain_s + STOP_S),
            "",
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            f"last_nodes=${last}",
            f"export {DRAIN_VARIABLE}={drain_s}",
            f"cd {shlex.quote(settings.folder)}",
            RUN_SCRIPT.rstrip("\n"),
            *(_start_nodes(group, index, len(groups)) for index, group in enumerate(groups)),
            TRAIN_SCRIPT,
        ]
    )


def _header(groups: Sequence[NodeGroup], settings: SlurmSettings, notice_s: int) -> list[str]:
    common = [f"--job-name={dns_name(settings.name)}", "--output=%x-%j.log", "--open-mode=append", "--requeue"]
    common += [f"--signal=B:TERM@{notice_s}", *([f"--time={settings.time}"] if settings.time else [])]
    lines = [*common, *settings.options.get("", ())]
    for index, group in enumerate(groups):
        lines += ["hetjob"] if index else []
        lines += [*_options(group), *settings.options.get(group.name, ())]
    return [f"#SBATCH {line}" for line in lines]


def _options(group: NodeGroup) -> list[str]:
    options = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={group.cpus}"]
    if group.gpus:
        accelerator = group.labels.get(ACCELERATOR, "").lower()
        options.append(f"--gres=gpu:{accelerator + ':' if accelerator else ''}{group.gpus}")
    if group.memory_bytes:
        options.append(f"--mem={-(-group.memory_bytes * 5 // 4 // 2**20) + 4096}M")
    return options


def _start_nodes(group: NodeGroup, index: int, groups: int) -> str:
    where = [f"--het-group={index}"] if groups > 1 else []
    labels = ",".join(f"{key}={value}" for key, value in group.labels.items())
    options = [f"--num-cpus={group.cpus}", f"--num-gpus={group.gpus}", *([f"--labels={labels}"] if labels else [])]
    options += [f"--memory={group.memory_bytes}"] if group.memory_bytes else []
    task = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={group.cpus}"]
    return shlex.join(["start_nodes", *where, *task, "--", *options])
