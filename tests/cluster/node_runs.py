"""A real run on the nodes of a test: `rollart train --address` on the head, with its journal read from here."""

import signal
import sys
from collections import Counter

from nodes import signal_child, wait_until

from rollart.observe.journal import fold_journal, read_journal
from rollart.types.errors import RequestError
from rollart.types.journal import GroupOpened, StepTrained, TrajectoryStarted, TurnEnded

CONFIG = """
name = "nodes"
steps = 100000
checkpoint_every = 10
reward_pool = "cpu"

[batch]
trajectories = 8
group_size = 4

[deadlines]
drain_s = 60

[trainer]
pool = "cpu"

[tasks.long]
environment = "maze.py:Maze"
environment_pool = "cpu"
hardware = "H800"
environments = 8
max_turns = 3
max_turn_tokens = 4
max_context = 200
inject = { latency_ms = 50.0 }

[tasks.short]
environment = "maze.py:Maze"
environment_pool = "cpu"
hardware = "H20"
environments = 8
max_turns = 3
max_turn_tokens = 4
max_context = 200
inject = { latency_ms = 50.0 }

[pools.cpu]
engines = 0

[pools.H800]
accelerator = "H800"
ranks = 1
engines = 2

[pools.H20]
accelerator = "H20"
ranks = 1

[model.config]
model_type = "qwen3"
vocab_size = 260
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 256
"""
MAZE = """
class Maze:
    def reset(self, *, seed=None, options=None):
        return f"maze {seed}", {}

    def step(self, action):
        return "next", len(action) / 4, not action.isascii(), False, {}
"""
ROLLART = (sys.executable, "-m", "rollart")
END_S = 120.0


class Run:
    """Context manager: a run in the background, on the head of the cluster. It ends by SIGTERM, with a checkpoint."""

    def __init__(self, cluster, config=CONFIG):
        self._cluster = cluster
        self.head = cluster.head
        self.head.path("config.toml").write_text(config)
        self.head.path("maze.py").write_text(MAZE)
        self.journal = self.head.path("run/journal.sqlite")

    def __enter__(self):
        words = ("train", "config.toml", "--address", self._cluster.address, "--out", "run")
        with open(self.head.path("train.log"), "w") as log:
            self._process = self.head.popen(*ROLLART, *words, env=self._cluster.environment, stdout=log, stderr=log)
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            signal_child(self._process, signal.SIGKILL)
            self._process.wait()

    def log(self):
        return self.head.path("train.log").read_text()

    def events(self, kind=object):
        try:
            return [event for event in read_journal(self.journal) if isinstance(event, kind)]
        except RequestError:  # it is not there yet, or empty
            return []

    def until(self, condition, seconds=100.0):
        """Wait for a condition of the events; the run must go on meanwhile."""

        def met():
            assert self._process.poll() is None, self.log()
            return condition(self.events())

        try:
            return wait_until(met, seconds, pause_s=0.3)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def steps(self):
        return len(self.events(StepTrained))

    def until_steps(self, more, seconds=100.0):
        """Wait for further steps."""
        wanted = self.steps() + more
        return self.until(lambda _: self.steps() >= wanted, seconds)

    def finish(self):
        """Stop it; the journal must be clean. Returns its events."""
        signal_child(self._process, signal.SIGTERM)
        self._process.wait(timeout=END_S)
        events = self.events()
        violations, _ = fold_journal(self.journal)[1].finish()
        assert not violations, violations
        self.head.run(*ROLLART, "audit", "run")
        return events


def served(events, since=0.0):
    """Number of turns by (task, pool of the engine) since a point in time."""
    tasks, groups, found = {}, {}, Counter()
    for event in events:
        if isinstance(event, GroupOpened):
            groups[event.group] = event.task
        elif isinstance(event, TrajectoryStarted):
            tasks[event.trajectory] = groups[event.group]
        elif isinstance(event, TurnEnded) and event.at >= since:
            found[tasks[event.trajectory], event.engine.split("/")[1]] += 1
    return found


def now(run):
    """The time of the run's journal."""
    return run.events()[-1].at
