"""Kill processes of real runs with SIGKILL, any of them at any phase, and check that the run survives.

A seed is one small run of two tasks on two pools, with one kill and sometimes a second one:

    target   the controller; the trainer; an engine; an environment worker; Ray's raylet; Ray's GCS server; everything
             at once, including Ray and its reaper. With `--runtime cluster`, on four Ray nodes of this machine: the
             first four, a node with everything on it, and the head of the cluster
    when     start        while the run, the worker, or Ray starts
             step         after a step of the run
             checkpoint   while a checkpoint is being written
             end          after the last step

A run recovers from the loss of a worker by itself. Without its Ray it ends by itself, within `ENDS_S` and with one line
that names the cause. After the death of the controller or of Ray the run is resumed, at once or when all its processes
are gone. Then this must hold: the run ends by itself with exit code 0, `rollart audit` finds no violation, neither now
nor right after the kill, all steps are in the journal and in the metrics, the last checkpoint loads, and nothing is
left: no process, no shared memory, no folder of Ray.

A run on a cluster recovers from the loss of a node by itself, with what is left; a run that lost the head is resumed on
a new cluster.

This process adopts orphans, so the processes of a run are exactly its descendants. Workers are identified by the log
that they write to, on a cluster by their titles, Ray's own processes by their programs.
"""

import argparse
import ctypes
import enum
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollart.backends.trainers.checkpoint import Checkpoint, Checkpoints
from rollart.observe.journal import fold_journal, read_since_snapshot
from rollart.policy.lineage import replay
from rollart.types.errors import RollartError

STEPS = 8
CHECKPOINT_EVERY = 2
CONFIG = f"""
name = "kills"
steps = {STEPS}
alpha = 1
eval_every = 4
checkpoint_every = {CHECKPOINT_EVERY}
codec = "rollart.backends.environments.codec:LetterCodec"

[batch]
trajectories = 16
group_size = 4

[tasks.lake]
environment = "rollart.tasks.frozenlake:FrozenLake"
environment_settings = {{ size = 2 }}
hold_out = "seed"
hardware = "near"
environments = 8
max_turns = 8
max_turn_tokens = 4
max_context = 512
eval_episodes = 4

[tasks.game]
environment = "rollart.tasks.game:GuessTheNumber"
hardware = "far"
environments = 8
max_turns = 6
max_turn_tokens = 4
max_context = 512
eval_episodes = 4

[pools.near]
[pools.far]

[trainer]
learning_rate = 3e-3

[model.config]
model_type = "qwen3"
vocab_size = 64
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 512
tie_word_embeddings = true
"""
NODES = "cpu=1,near=1,far=1,training=1"
ON_NODES = """
[pools.near]
labels = { "rollart/kind" = "near" }
[pools.far]
labels = { "rollart/kind" = "far" }
[pools.training]
engines = 0
labels = { "rollart/kind" = "training" }

[trainer]
pool = "training"
"""
CLUSTER_CONFIG = CONFIG.replace("[pools.near]\n[pools.far]\n\n[trainer]\n", ON_NODES)
ROLLART = [sys.executable, "-c", "from rollart.cli.main import main; main()"]
SHARED_MEMORY = Path("/dev/shm")
PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 300.0
"""For one process of a run, from its start or its last kill to its end."""
GONE_S = 60.0
"""For what is left of a controller that was killed, or has ended."""
ENDS_S = 30.0
"""For a run whose Ray was killed."""
LOOK_S = 0.002
TWICE = 0.3
"""The share of seeds with a second kill."""
_STEP = re.compile(rb"^step (\d+)/", re.MULTILINE)


def _only_logs(folder: Path) -> bool:
    """Whether this is the folder of a node with nothing but logs of killed processes, which stay until they are old.

    See `ports/folder_transfer.py` and `distributed/remote_logs.py`.
    """
    ours = folder.name == f"rollart-{os.getuid()}"
    return ours and all(path.suffix == ".log" for path in folder.rglob("*") if path.is_file())


class Target(enum.StrEnum):
    CONTROLLER = "controller"
    TRAINER = "trainer"
    ENGINE = "engine"
    ENVIRONMENT = "environment"
    RAYLET = "raylet"
    GCS_SERVER = "gcs_server"
    EVERYTHING = "everything"
    NODE = "node"
    HEAD = "head"


class When(enum.StrEnum):
    START = "start"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    END = "end"


WORKERS = (Target.TRAINER, Target.ENGINE, Target.ENVIRONMENT)
KINDS = {
    "ray": (Target.CONTROLLER, *WORKERS, Target.RAYLET, Target.GCS_SERVER, Target.EVERYTHING),
    "inline": (Target.CONTROLLER,),
    "cluster": (Target.NODE, Target.CONTROLLER, Target.NODE, *WORKERS, Target.HEAD),
}
RAY = {Target.RAYLET: "Ray's raylet", Target.GCS_SERVER: "Ray's GCS server", Target.HEAD: "the "}
"""What a run cannot do without, as messages name it: of a cluster, its head or the node of the controller."""
FATAL = (Target.CONTROLLER, Target.EVERYTHING, *RAY)
"""Targets from which a run does not recover by itself."""


class Kill(NamedTuple):
    """Kill `target`, `delay_s` after `when`; `step` is the first that counts, `which` selects among several workers."""

    target: Target
    when: When
    step: int
    delay_s: float
    which: float

    def __str__(self) -> str:
        at = f" {self.step}" if self.when in (When.STEP, When.CHECKPOINT) else ""
        return f"{self.target} at {self.when}{at} +{1000 * self.delay_s:.0f} ms"


class Plan(NamedTuple):
    """The kills of one seed."""

    kills: tuple[Kill, ...]
    patient: bool
    """Whether a resume waits until all processes of the previous controller are gone."""


def plan(seed: int, runtime: str) -> Plan:
    """Targets and phases alternate, so that 28 consecutive seeds cover every combination; the rest is random."""
    chance = random.Random(f"kills {seed}")
    kinds, moments = KINDS[runtime], tuple(When)
    kills = [_kill(chance, kinds[seed % len(kinds)], moments[seed % len(moments)])]
    if chance.random() < TWICE:
        kills.append(_kill(chance, chance.choice(kinds), chance.choice(moments)))
    return Plan(tuple(kills), chance.random() < 0.5)


def _kill(chance: random.Random, target: Target, when: When) -> Kill:
    longer = target in (Target.CONTROLLER, Target.EVERYTHING)
    # About the duration of a start, a step, a checkpoint, a shutdown.
    longest_s = {
        When.START: 10.0 if longer else 3.0,
        When.STEP: 0.4,
        When.CHECKPOINT: 0.03,
        When.END: 1.0 if longer else 0.2,
    }[when]
    return Kill(target, when, chance.randrange(1, STEPS), chance.uniform(0, longest_s), chance.random())


class Outcome(msgspec.Struct):
    """Result of one seed."""

    seed: int
    planned: list[str]
    killed: list[str] = []
    missed: list[str] = []
    """Kills that came too late: the process or worker had already ended."""
    resumed: int = 0
    started_again_s: list[float] = []
    """Times of further starts, counted from the first; not a resume if the run had no config yet."""
    violations: list[str] = []
    leftovers: list[str] = []
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.violations and not self.leftovers


# --- processes ------------------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Make this process the parent of all orphans among its descendants."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel has no child subreaper; Linux 3.4 or newer is needed")


def descendants(started: int | None) -> list[int]:
    """Living descendants of this process. Adopted ones that have ended are reaped, but not `started`."""
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in brackets, may hold anything; state and parent come after it.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(parent), []).append(int(entry.name))
            if state in "ZX":
                ended.add(int(entry.name))
    found, ahead = [], [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(), [])
        ahead += below
        found += [pid for pid in below if pid not in ended]
    for pid in children.get(os.getpid(), []):
        if pid in ended and pid != started:
            os.waitpid(pid, os.WNOHANG)
    return found


def words(pid: int) -> str:
    """Command line of a process, or the title that it gave itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def named(pid: int) -> str:
    """Readable name of a process."""
    return f"process {pid}: {words(pid)[:120]}"


def below(pid: int) -> list[int]:
    """Descendants of a process."""
    found, ahead = [], [pid]
    while ahead:
        children = Path(f"/proc/{ahead.pop()}/task")
        for thread in children.iterdir() if children.is_dir() else ():
            try:
                ahead += (more := [int(child) for child in (thread / "children").read_text().split()])
            except OSError:
                continue
            found += more
    return found


def program(pid: int) -> str:
    """The file that a process runs, without its folder."""
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def kill(pid: int) -> bool:
    """Kill a process; returns whether it still existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def within(limit_s: float, condition: Callable[[], bool], look_s: float = 0.02) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(look_s)
    return True


# --- one seed -------------------------------------------------------------------------------------------------------


class Run:
    """One run, through all processes that it takes to end it."""

    def __init__(self, scratch: Path, runtime: str) -> None:
        self.folder = scratch / "run"
        self._scratch = scratch
        self._runtime = runtime
        (scratch / "t").mkdir()
        config = CLUSTER_CONFIG if runtime == "cluster" else CONFIG
        (scratch / "run.toml").write_text(config, encoding="utf-8")
        self._controllers: list[int] = []
        self._process: subprocess.Popen[bytes]
        self._log: Path
        self._drafts_before: set[str] = set()

    def start(self) -> bool:
        """Start or resume the run; returns whether it was a resume. Without a config there is nothing to resume."""
        resume = (self.folder / "config.json").exists()
        new = [str(self._scratch / "run.toml"), "--out", str(self.folder)]
        what = ["--resume", str(self.folder)] if resume else new
        where = ["--runtime", self._runtime]
        if self._runtime == "cluster":
            self._cluster_up()
            where = ["--address", "auto"]
        self._log = self._scratch / f"{len(self._controllers)}.log"
        self._drafts_before = self._drafts()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*ROLLART, "train", *what, *where, "--json"],
                cwd=self._scratch if self._runtime == "cluster" else None,  # it travels
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=self._environment(),
            )
        self._controllers.append(self._process.pid)
        return resume

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "TMPDIR": str(self._scratch / "t"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._scratch / "torch"),  # it is meant to stay
        }

    def _cluster_up(self) -> None:
        """A new cluster, unless the last one still has its head."""
        if not self._raylets(head=True):
            self._cluster("down")
            self._cluster("up", "--nodes", NODES, "--num-cpus", "8", "--num-gpus", "0")

    def _cluster(self, *arguments: str) -> None:
        command = [*ROLLART, "cluster", *arguments]
        subprocess.run(command, env=self._environment(), capture_output=True, check=True, timeout=LIMIT_S)

    def _raylets(self, *, head: bool) -> list[int]:
        found = [pid for pid in descendants(None) if program(pid) == Target.RAYLET]
        return [pid for pid in found if ("--head" in words(pid)) == head]

    def living(self) -> list[int]:
        return descendants(self._process.pid)

    def kill(self, order: Kill) -> bool:
        """Wait for the moment and kill; returns whether there was a process to kill."""
        return self._moment(order) and self._strike(order)

    def _moment(self, order: Kill) -> bool:
        match order.when:
            case When.START if order.target in (Target.CONTROLLER, Target.EVERYTHING):
                due = self._until(lambda: self._log.stat().st_size > 0)  # the run has its folder
            case When.START:
                due = self._until(lambda: bool(self._processes(order.target)), look_s=0.05)
            case When.STEP:
                due = self._until(lambda: self._step() >= order.step)
            case When.CHECKPOINT:
                due = self._until(lambda: self._step() >= order.step and self._saving())
            case When.END:
                due = self._until(lambda: self._step() >= STEPS)
        return due and self._delayed(order.delay_s)

    def _delayed(self, delay_s: float) -> bool:
        """Wait; no longer than to the next step, so that a fast machine does not outrun the kill."""
        step, until = self._step(), time.monotonic() + delay_s
        return self._until(lambda: time.monotonic() >= until or self._step() > step)

    def _strike(self, order: Kill) -> bool:
        if order.target is Target.CONTROLLER:
            return kill(self._process.pid) and self._process.wait() == -signal.SIGKILL
        if order.target is Target.EVERYTHING:
            alive = kill(self._process.pid) and self._process.wait() == -signal.SIGKILL
            while left := self.living():  # including those started meanwhile
                for pid in left:
                    kill(pid)
            return alive
        if order.target in (Target.NODE, Target.HEAD):
            return self._strike_node(order)
        # Wait for a process that is restarting after an earlier kill.
        if not self._until(lambda: bool(self._processes(order.target)), look_s=0.02):
            return False
        found = self._processes(order.target)
        return bool(found) and kill(found[int(order.which * len(found))])

    def _strike_node(self, order: Kill) -> bool:
        """Kill a raylet and everything below it; with the head, Ray's GCS too."""
        found = self._raylets(head=order.target is Target.HEAD)
        if not found or self._process.poll() is not None:
            return False
        raylet = found[int(order.which * len(found))]
        victims = [raylet, *below(raylet)]
        if order.target is Target.HEAD:
            victims += [pid for pid in self.living() if program(pid) == Target.GCS_SERVER]
        return sum(kill(pid) for pid in victims) > 0

    def _until(self, condition: Callable[[], bool], look_s: float = LOOK_S) -> bool:
        """Wait for a condition; returns whether it came true before the process ended."""
        within(LIMIT_S, lambda: condition() or self._process.poll() is not None, look_s)
        return self._process.poll() is None and condition()

    def _processes(self, target: Target) -> list[int]:
        """Ray's own process, or the workers of a role."""
        if target in (Target.NODE, Target.HEAD):
            return self._raylets(head=target is Target.HEAD)
        if target not in RAY:
            return self._titled(target) if self._runtime == "cluster" else self._workers(target)
        return [pid for pid in self.living() if program(pid) == target.value]

    def _workers(self, role: Target) -> list[int]:
        """Workers of a role, found by the logs that they write to."""
        found = {}
        for pid in self.living():
            try:
                log = Path(os.readlink(f"/proc/{pid}/fd/1"))
            except OSError:
                continue
            if log.is_relative_to(self.folder / "logs" / role):
                found[str(log)] = pid
        return [found[log] for log in sorted(found)]

    def _titled(self, role: Target) -> list[int]:
        """Workers of a role on a cluster, whose logs may be anywhere."""
        return sorted(pid for pid in self.living() if words(pid).startswith(f"rollart: {role} "))

    def _step(self) -> int:
        """The last step that this process logged."""
        return max((int(number) for number in _STEP.findall(self._log.read_bytes())), default=0)

    def _drafts(self) -> set[str]:
        folder = self.folder / "checkpoints"
        return {entry.name for entry in folder.iterdir() if entry.suffix == ".tmp"} if folder.is_dir() else set()

    def _saving(self) -> bool:
        if self._runtime == "cluster":  # it is written elsewhere, and sent
            return self._step() % CHECKPOINT_EVERY == 0
        return bool(self._drafts() - self._drafts_before)

    def end_without(self, target: Target) -> tuple[bool, str]:
        """Wait for the end of a run whose Ray was killed; returns whether to resume it, and what was wrong.

        A run that had done all its steps may end as if nothing had happened.
        """
        try:
            code = self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self._strike(Kill(Target.EVERYTHING, When.END, 0, 0.0, 0.0))
            return True, f"without its {target} it did not end within {ENDS_S:g} s: {self._log_tail()}"
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("rollart: ")]
        expected = f"RuntimeLost: {RAY[target]}"
        if code and not (len(errors) == 1 and expected in errors[0] and "--resume" in errors[0]):
            return True, f"without its {target}, exit code {code}: {self._log_tail()}"
        return code != 0, ""

    def end(self) -> str:
        """Wait for the end of the run; returns what was wrong, if anything."""
        try:
            code = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._strike(Kill(Target.EVERYTHING, When.END, 0, 0.0, 0.0))
            return f"it did not end within {LIMIT_S:g} s: {self._log_tail()}"
        return f"exit code {code}: {self._log_tail()}" if code else ""

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace").strip()[-600:]

    def remains(self) -> list[str]:
        """Processes, folders and shared memory that outlived the run."""
        if self._runtime == "cluster":
            self._cluster("down")
        within(GONE_S, lambda: not self.living(), 0.05)
        left = [named(pid) for pid in self.living()]
        for pid in self.living():
            kill(pid)
        left += [str(path) for path in (self._scratch / "t").iterdir() if not _only_logs(path)]
        pids = "|".join(map(str, self._controllers))
        ours = re.compile(rf"\.?rollart-.*-({pids})(\D.*)?")  # and not those of a process whose pid begins alike
        return left + [str(path) for path in SHARED_MEMORY.iterdir() if ours.fullmatch(path.name)]

    def audit(self) -> list[str]:
        """Violations that `rollart audit` finds now; none for a run without events."""
        if not (self.folder / "journal.sqlite").is_file() or next(self._events(), None) is None:
            return []
        done = subprocess.run([*ROLLART, "audit", self.folder, "--json"], capture_output=True, text=True, check=False)
        if not done.stdout:
            return [f"the audit failed: {done.stderr.strip()[-600:]}"]
        return [f"rule {found['rule']}: {found['what']}" for found in json.loads(done.stdout)["violations"]]

    def _events(self) -> Any:
        return read_since_snapshot(self.folder / "journal.sqlite")

    def result(self) -> list[str]:
        """Everything wrong with a finished run."""
        wrong = self.audit()
        report = fold_journal(self.folder / "journal.sqlite")[1].finish()[1]
        if report is None or not report.ended:
            wrong.append("the journal does not end with the end of the run")
        if (step := replay(self._events()).step) != STEPS:
            wrong.append(f"the lineage is at step {step} of {STEPS}")
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_bytes().splitlines()]
        recorded = {line["step"] for line in lines if line["type"] == "step"}
        if missing := set(range(1, STEPS + 1)) - recorded:
            wrong.append(f"no metrics of the steps {sorted(missing)}")
        checkpoint = Checkpoints(self.folder / "checkpoints").newest()
        if checkpoint is None or checkpoint.version.step != STEPS:
            wrong.append(f"the last checkpoint is {checkpoint and checkpoint.version}")
        else:
            wrong += _loads(checkpoint)
        return wrong


def _loads(checkpoint: Checkpoint) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    return [] if finite else [f"the checkpoint of {checkpoint.version} is not finite"]


def try_seed(seed: int, runtime: str, scratch: Path) -> Outcome:
    planned = plan(seed, runtime)
    outcome = Outcome(seed, [str(order) for order in planned.kills])
    began = time.monotonic()
    run = Run(scratch, runtime)
    run.start()
    for order in planned.kills:
        if not run.kill(order):
            outcome.missed.append(str(order))
            continue
        outcome.killed.append(str(order))
        ended = order.target in FATAL
        if order.target in RAY:
            ended, failed = run.end_without(order.target)
            outcome.violations += [failed] if failed else []
        if ended:
            outcome.violations += [f"after the kill: {wrong}" for wrong in run.audit()]
            if planned.patient and runtime != "cluster" and not within(GONE_S, lambda: not run.living(), 0.05):
                outcome.leftovers += [f"after the kill: {named(pid)}" for pid in run.living()]
            outcome.started_again_s.append(round(time.monotonic() - began, 1))
            outcome.resumed += run.start()
    if failed := run.end():
        outcome.violations.append(failed)
    outcome.leftovers += run.remains()
    try:
        outcome.violations += run.result()
    except (RollartError, OSError, ValueError) as error:
        outcome.violations.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began
    return outcome


# --- command line ---------------------------------------------------------------------------------------------------


def line(outcome: Outcome) -> str:
    how = "ok" if outcome.clean else "FAILED"
    parts = [", ".join(outcome.killed) or "no kill"]
    parts += [f"missed: {each}" for each in outcome.missed]
    parts += [f"started again at {', '.join(map(str, outcome.started_again_s))} s"] if outcome.started_again_s else []
    parts += [f"violation: {each}" for each in outcome.violations] + [f"left: {each}" for each in outcome.leftovers]
    return f"seed {outcome.seed}: {how} in {outcome.seconds:.1f} s; " + "; ".join(parts)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    killed = [each.split() for outcome in outcomes for each in outcome.killed]
    return {
        "seeds": len(outcomes),
        "clean": sum(outcome.clean for outcome in outcomes),
        "kills": dict(sorted(Counter(words[0] for words in killed).items())),
        "moments": dict(sorted(Counter(words[2] for words in killed).items())),
        "missed": sum(len(outcome.missed) for outcome in outcomes),
        "resumed": sum(outcome.resumed for outcome in outcomes),
        "violations": sum(len(outcome.violations) for outcome in outcomes),
        "leftovers": sum(len(outcome.leftovers) for outcome in outcomes),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "failed_seeds": [outcome.seed for outcome in outcomes if not outcome.clean],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGKILL in real runs; see the top of this file.")
    parser.add_argument("--seeds", type=int, default=7, metavar="N", help="how many; default 7, one of each kind")
    parser.add_argument("--from", type=int, default=0, metavar="S", dest="first", help="the first seed; default 0")
    parser.add_argument("--runtime", choices=list(KINDS), default="ray", help="default ray")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args()

    adopt_orphans()
    outcomes = []
    for seed in range(options.first, options.first + options.seeds):
        # Short, because Ray puts sockets below it, whose paths have a limit.
        scratch = Path(tempfile.mkdtemp(prefix="k-"))
        outcomes.append(try_seed(seed, options.runtime, scratch))
        sys.stderr.write(line(outcomes[-1]) + ("" if outcomes[-1].clean else f"; see {scratch}") + "\n")
        sys.stderr.flush()
        if outcomes[-1].clean:
            shutil.rmtree(scratch)
    total = summary(outcomes)
    if options.json:
        total["outcomes"] = outcomes
        sys.stdout.write(msgspec.json.encode(total).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{name:>12}  {value}\n" for name, value in total.items()))
    return int(total["clean"] < total["seeds"])


if __name__ == "__main__":
    sys.exit(main())
