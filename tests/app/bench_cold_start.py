"""What the cold start reaches, run by hand: `python tests/app/bench_cold_start.py [preset] [seeds] [episodes]`.

Makes the small model of a preset (quickstart by default) and plays held-out episodes of every task at temperature 1
with the torch engine. Prints CPU seconds of the cold start, and mean reward by task.
"""

import sys
import tempfile
import time
from pathlib import Path

from rollart.app.cold_start import make_small_model
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.environments.hf_codec import HfCodec
from rollart.backends.stores.memory import MemoryStore
from rollart.cli.train import config_file
from rollart.config.load import load_toml
from rollart.tasks.builtin import BUILT_IN
from rollart.tasks.prompts import SeedPrompts
from rollart.types.messages import Add, EndSession, Sampling, TurnDone
from rollart.types.tokens import Segment, TokenSequence


class Episodes:
    """Plays all prompts of a task at once, as the controller would."""

    def __init__(self, folder, task):
        self.codec = HfCodec(folder)
        settings = {"model": folder, "store": MemoryStore(), "serve_folder_as": (0, 0), "max_context": 640}
        settings["progress_interval_s"] = 3600.0  # all tokens come with the end of a turn
        self.engine = TorchEngine(settings, lambda: None)
        self.task, self.known = task, BUILT_IN[task]
        self.waiting = {}

    def mean_reward(self, episodes):
        prompts = SeedPrompts(self.task, 1_000_000, episodes, held_out=True)
        returns = [0.0] * episodes
        for number in range(episodes):
            environment, log = self.known.build(), TokenSequence()
            log.append_context(Segment.of(self.codec.render(environment.reset(prompts.next()).observation, first=True)))
            self.ask(number, environment, log, 1)
        while self.waiting:
            for event in self.engine.advance(0.0).events:
                if isinstance(event, TurnDone):
                    number, environment, log, turn = self.waiting.pop(event.request)
                    returns[number] += self.act(event, number, environment, log, turn)
        return sum(returns) / episodes

    def ask(self, number, environment, log, turn):
        request = number * 100 + turn
        self.waiting[request] = (number, environment, log, turn)
        sampling = Sampling(self.known.max_turn_tokens, stop_tokens=self.codec.stop_tokens, seed=request)
        new = log.since_turn()
        self.engine.post([Add(request, number, self.task, log.turn_length, log.turn_digest, new, sampling)])

    def act(self, event, number, environment, log, turn):
        log.append_sampled(event.generated)
        answer = event.generated.tokens.ids().tolist()
        step = environment.step(self.codec.text(answer))
        if step.done or turn == self.known.max_turns:
            self.engine.post([EndSession(number)])
        else:
            end = [] if answer[-1] in self.codec.stop_tokens else [self.codec.stop_tokens[0]]
            log.append_context(Segment.of([*end, *self.codec.render(step.observation, first=False)]))
            self.ask(number, environment, log, turn + 1)
        return step.reward


def main(preset="quickstart", seeds=3, episodes=500):
    tables = load_toml(config_file(preset))
    for seed in range(int(seeds)):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            before = time.process_time()
            make_small_model(folder, seed=seed, **tables["model"]["cold_start"])
            seconds = time.process_time() - before
            rates = {task: Episodes(str(folder), task).mean_reward(int(episodes)) for task in tables["tasks"]}
        figures = ", ".join(f"{task} {rate:.3f}" for task, rate in rates.items())
        sys.stdout.write(f"seed {seed}: {seconds:.0f} CPU-seconds; {figures}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
