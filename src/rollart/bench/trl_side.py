"""TRL's side of `rollart bench trl`; runs in an environment with TRL.

    python -m rollart.bench.trl_side ORDER

`ORDER` is a file with an `Order` as JSON. Only a `Played` as JSON goes to stdout.

Both ways train with TRL's own `GRPOTrainer`, on all cores: one forward and backward pass over padded rows and one step
of AdamW per batch, in float32, without a reference model. Defaults of TRL that would only cost time here are off:
gradient checkpointing, saving, log-probabilities of the sampler.

`environment_factory` is TRL's own loop, used as documented: an environment is a class, and its method `move` a tool.
The small model has never called a tool, so its tokenizer parses every answer as a call of `move` and renders the tool's
result as an observation (`lake_tokenizer`): the model sees the same tokens as in rollart. This favours TRL: there is no
schema in the prompt, and no JSON to generate or parse. Two properties of TRL's loop remain. It queries the model once
more when an episode is over; that answer is parsed as text, which ends the loop, as with a model that knows how to
stop, and costs TRL a short answer. And it queries after every call, so with at most `max_turns` answers the last one is
not played, which saves TRL a step of the longest episodes. An async tool would gain nothing: TRL awaits those of one
episode before it goes to the next.

`rollout_func` gets what a skilled user would write: see `bench.trl_rollout`. The dataset with a reward is a script of
its own: `bench.snippets.with_trl`.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer, TrainerCallback

from rollart.backends.environments.hf_codec import HfCodec
from rollart.bench.trl import Order, Played, ScriptOrder
from rollart.bench.trl_rollout import Episode, Game, play
from rollart.config.injection import Injection
from rollart.tasks.tokenizer import AGENT, END, USER
from rollart.types.trajectory import Prompt

USAGE = "usage: python -m rollart.bench.trl_side ORDER"
OVER = "over"
"""Result of the tool at the end of an episode, in place of an unused observation."""
TOOL_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message.role == 'assistant' %}}{AGENT}{{{{ message.content }}}}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
    f"{END}{{% else %}}{USER}{{{{ message.content }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{AGENT}{{% endif %}}"
)
"""Template of the small tokenizer. TRL requires a place for tool calls, although no tokenised conversation has any."""


class Notes(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Records when steps ended, and what was played in them."""

    def __init__(self) -> None:
        self.ended_at: list[float] = []
        self.cpu_s: list[float] = []
        """CPU time at the ends of the steps."""
        self.turns: list[list[int]] = []
        self.hung: list[list[bool]] = []
        self.tokens: list[float] = []

    def played(self, turns: Sequence[int], games: Sequence[Game]) -> list[float]:
        """Record a batch; returns its rewards."""
        self.turns.append(list(turns))
        self.hung.append([game.hung for game in games])
        return [game.reward for game in games]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - callback API
        self.ended_at.append(time.perf_counter())
        self.cpu_s.append(time.process_time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if "completions/mean_length" in logs:
            self.tokens.append(logs["completions/mean_length"])

    def after(self, warm_up: int) -> Played:
        turns = [each for batch in self.turns[warm_up:] for each in batch]
        hung = [each for batch in self.hung[warm_up:] for each in batch]
        tokens = self.tokens[warm_up:]
        return Played(
            trajectories=len(turns),
            seconds=self.ended_at[-1] - self.ended_at[warm_up - 1],
            turns=sum(turns) / len(turns),
            tokens=sum(tokens) / len(tokens),
            hung=sum(hung) / len(hung),
            cpu_ms={"trl": 1e3 * (self.cpu_s[-1] - self.cpu_s[warm_up - 1]) / len(turns)},
        )


def train(order: Order) -> Played:
    """Run all steps with TRL."""
    import trl
    from datasets import Dataset

    notes = Notes()
    way = {"environment_factory": by_factory, "rollout_func": by_function}[order.way](order, notes)
    with tempfile.TemporaryDirectory() as scratch:
        settings = trl.GRPOConfig(
            output_dir=scratch,
            max_steps=order.steps,
            per_device_train_batch_size=order.rows,
            gradient_accumulation_steps=order.trajectories // order.rows,
            num_generations=order.group_size,
            max_completion_length=order.max_context,
            generation_kwargs={"max_new_tokens": order.max_turn_tokens, "top_k": 0},
            max_tool_calling_iterations=order.max_turns - 1,
            temperature=order.temperature,
            learning_rate=order.learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=order.model,
            args=settings,
            train_dataset=Dataset.from_list(way.pop("rows")),
            callbacks=[notes],
            **way,
        )
        trainer.train()
    return notes.after(order.warm_up)


def train_script(order: ScriptOrder) -> Played:
    """Run the script of a user. Its trainer is not changed but watched."""
    from rollart.bench.snippets import with_trl

    notes = Notes()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = with_trl.trainer(order.model, order.rows, str(order.steps), scratch)
        trainer.add_callback(notes)
        trainer.args.logging_steps = 1
        trainer.train()
    trajectories = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    notes.turns = [[1] * trajectories for _ in notes.ended_at]
    notes.hung = [[False] * trajectories for _ in notes.ended_at]
    return notes.after(order.warm_up)


# --- environment_factory --------------------------------------------------------------------------------------------


def by_factory(order: Order, notes: Notes) -> dict[str, Any]:
    """Arguments of a trainer that does its own rollouts."""
    numbers = count()

    def score(completions: Any, environments: Any, **_: Any) -> list[float]:
        turns = [sum(message["role"] == "assistant" for message in completion) for completion in completions]
        return notes.played(turns, [environment.game for environment in environments])

    def lake() -> Lake:
        return Lake(order.prompts, Game(next(numbers) % order.group_size, Injection(**order.inject)))

    return {
        "rows": [{"prompt": [{"role": "user", "content": ""}], "number": n} for n in range(len(order.prompts))],
        "reward_funcs": score,
        "processing_class": lake_tokenizer(order.model),
        "environment_factory": lake,
    }


class Lake:
    """As required by `environment_factory`: every public method except `reset` is a tool."""

    def __init__(self, prompts: Sequence[Prompt], game: Game) -> None:
        self._prompts = prompts
        self.game = game

    def reset(self, number: int, **_: Any) -> str:
        return self.game.begin(self._prompts[number])

    def move(self, answer: str) -> str:
        """Walk over the lake.

        Args:
            answer: The agent's answer.

        Returns:
            Where it stands then.
        """
        seen = self.game.play(answer)
        return OVER if self.game.done else seen


def lake_tokenizer(folder: str) -> Any:
    """The model's tokenizer, with an answer parsed as a call of `move` until the episode is over."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = TOOL_TEMPLATE
    over = tokenizer(USER + OVER + AGENT)["input_ids"]

    def parse(ids: Sequence[int], *, prefix: Sequence[int], tools: Any = None) -> dict[str, Any]:  # noqa: ARG001
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        if list(prefix[-len(over) :]) == over:
            return {"role": "assistant", "content": answer}
        call = {"type": "function", "function": {"name": "move", "arguments": {"answer": answer}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    tokenizer.response_template = {}  # TRL calls `parse_response` only if this exists
    tokenizer.parse_response = parse
    return tokenizer


# --- rollout_func ---------------------------------------------------------------------------------------------------


def by_function(order: Order, notes: Notes) -> dict[str, Any]:
    """Arguments of a trainer that gets its rollouts from a function."""
    codec = HfCodec(order.model)
    threads = ThreadPoolExecutor(order.trajectories)
    injection = Injection(**order.inject)

    def roll_out(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        episodes = [
            Episode(Game(at % order.group_size, injection), order.prompts[int(number)], codec, order.max_turns)
            for at, number in enumerate(prompts)
        ]
        play(episodes, batched_generate(trainer), threads)
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids for episode in episodes],
            "logprobs": None,
            "env_mask": [episode.mask for episode in episodes],
            "game": [episode.game for episode in episodes],
        }

    def score(game: Sequence[Game], **_: Any) -> list[float]:
        return notes.played([each.turns for each in game], game)

    return {
        "rows": [{"prompt": str(number)} for number in range(len(order.prompts))],
        "reward_funcs": score,
        "rollout_func": roll_out,
    }


def batched_generate(trainer: Any) -> Callable[[Sequence[Sequence[int]]], list[list[int]]]:
    """`transformers.generate` on the trainer's model, sampling as the trainer itself would."""
    ends = set(trainer.eos_token_ids)
    model = trainer.accelerator.unwrap_model(trainer.model)

    def generate(contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        width = max(map(len, contexts))
        tokens = torch.tensor([[0] * (width - len(context)) + list(context) for context in contexts])
        mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=mask, generation_config=trainer.generation_config)
        return [_until_end(row, ends) for row in out[:, width:].tolist()]

    return generate


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write(USAGE + "\n")
        return 2
    try:
        order = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Order | ScriptOrder)
    except (OSError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"{arguments[0]} is not an order: {error}\n{USAGE}\n")
        return 2
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(order.threads)
    # TRL logs to stdout, which is redirected to stderr from here on.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        done = train(order) if isinstance(order, Order) else train_script(order)
        answer.write(msgspec.json.encode(done) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
