"""Demonstrations for supervised training: read from files and runs, or played by a script, and turned into tokens.

    SOURCE, or TASK=SOURCE

    demos.jsonl        a JSON object per line: a transcript (the JSON form of `rollart.Transcript`), or chat `messages`;
                       a `reward` beside them is that of the demonstration
    runs/first         the transcripts that a run has kept
    solve.py:player    a function that plays the task (`players`)

Invariant: tokens are those of a rollout with the same texts: observations are rendered and answers end as the codec
does it, and a played episode went through the same environment host.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from rollart.app.compose import codec_factory, codec_of
from rollart.app.players import Failed, PlayedTask, Turns
from rollart.app.run_folder import CONFIG, TRANSCRIPTS
from rollart.app.task_checks import prompts_of
from rollart.app.transcript_store import read_transcripts
from rollart.backends.environments.chat import ChatTask
from rollart.backends.environments.chat_template import NotRendered
from rollart.backends.environments.codec import Codec
from rollart.backends.environments.dialogue import Dialogue, TextDialogue, open_dialogue
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.config.tasks import TaskSettings
from rollart.config.tools import Mcp
from rollart.ports.factory import load
from rollart.types.chat import Message
from rollart.types.errors import Fault, RequestError
from rollart.types.trajectory import TRAINABLE, Purpose
from rollart.types.transcript import Transcript

PROMPT_SIDE = ("user", "system", "tool", "developer")


class Demonstration(NamedTuple):
    """One transcript, in tokens."""

    task: str
    sequences: list[Turns]
    reward: float | None


class TeachingCodec(Codec, Protocol):
    """A codec that also encodes answers."""

    def answer(self, text: str) -> list[int]:
        """Tokens of a written answer, with its end token."""
        ...


def teaching_codec(config: RunConfig) -> TeachingCodec:
    codec: Any = codec_of(config)
    if not callable(getattr(codec, "answer", None)):
        raise RequestError(
            f"the codec {codec_factory(config)[0]} cannot encode answers; add a method answer(text) that returns the "
            "tokens of an answer with its end token"
        )
    return codec  # type: ignore[no-any-return]


def read_demonstrations(config: RunConfig, sources: Sequence[str], say: Callable[[str], None]) -> list[Demonstration]:
    """All demonstrations with enough reward, cut to what fits into a context."""
    codec = teaching_codec(config)
    found: list[Demonstration] = []
    for source in sources:
        read = list(_read(config, codec, source, say))
        least = config.sft.min_reward
        kept = [each for each in read if least is None or (each.reward is not None and each.reward >= least)]
        dropped = f", {len(read) - len(kept)} below a reward of {least:g} left out" if least is not None else ""
        say(f"{source}: {len(kept)} demonstrations{dropped}")
        found += kept
    whole = [each for each in (_fitting(config, each) for each in found) if each.sequences]
    turns = [sum(map(len, each.sequences)) for each in found]
    lost = sum(turns) - sum(sum(map(len, each.sequences)) for each in whole)
    if lost:
        say(f"{lost} of {sum(turns)} turns are beyond max_context and left out")
    if not whole:
        raise RequestError("there are no demonstrations with answers to train on; check the source and sft.min_reward")
    return whole


def _read(config: RunConfig, codec: TeachingCodec, source: str, say: Callable[[str], None]) -> Iterator[Demonstration]:
    named, equals, rest = source.partition("=")
    task = named if equals and named in config.tasks else ""
    if equals and not task and not Path(source).exists():
        raise RequestError(
            f"--demonstrations {source}: there is no task {named!r}{did_you_mean(named, config.tasks)}; tasks are "
            f"{', '.join(config.tasks)}"
        )
    place = rest if task else source
    path = Path(place)
    if path.is_dir():
        return _of_run(config, codec, path, task)
    if path.is_file():
        return _of_file(config, codec, path, task)
    if all(place.rpartition(":")) and not place.endswith(".jsonl"):
        return _of_player(config, codec, place, _the_task(config, task, source), say)
    raise RequestError(
        f"--demonstrations {source}: there is no such file or folder; give a JSON-lines file, the folder of a run, or "
        "a player such as solve.py:player"
    )


def _the_task(config: RunConfig, task: str, source: str) -> str:
    if not task and len(config.tasks) > 1:
        raise RequestError(
            f"--demonstrations {source}: the config has several tasks ({', '.join(config.tasks)}); name one, as in "
            f"{next(iter(config.tasks))}={source}"
        )
    return task or next(iter(config.tasks))


# --- played ---------------------------------------------------------------------------------------------------------


def _of_player(
    config: RunConfig, codec: TeachingCodec, path: str, task: str, say: Callable[[str], None]
) -> Iterator[Demonstration]:
    player = load(path)
    prompts = prompts_of(config, task, held_out=False)
    failed: list[Failed] = []
    with PlayedTask(config, task, codec.answer) as stage:
        for _ in range(config.sft.episodes):
            played = stage.play(prompts.next(), player, config.seed)
            if isinstance(played, Failed):
                failed.append(played)
            else:
                yield Demonstration(task, played.sequences, played.reward)
    if failed:
        say(f"{path}: {len(failed)} of {config.sft.episodes} episodes failed and are left out: {failed[0].reason}")


# --- read -----------------------------------------------------------------------------------------------------------


def _of_run(config: RunConfig, codec: TeachingCodec, run: Path, task: str) -> Iterator[Demonstration]:
    if not (run / CONFIG).is_file():
        raise RequestError(f"--demonstrations {run}: it has no {CONFIG}; give the folder of a run")
    if config.sft.min_reward is None:
        raise RequestError(
            f"--demonstrations {run}: a run has good and bad transcripts; say which to imitate with sft.min_reward"
        )
    for stored in read_transcripts(run / TRANSCRIPTS):
        wanted = task in ("", stored.task) and stored.task in config.tasks
        if wanted and stored.purpose is Purpose.TRAIN and stored.outcome in TRAINABLE:
            transcript = stored.transcript()
            if not transcript.cut:
                yield Demonstration(stored.task, _tokens_of(config, codec, transcript), stored.reward)


def _of_file(config: RunConfig, codec: TeachingCodec, path: Path, task: str) -> Iterator[Demonstration]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):  # of text, more than newlines would end a line
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{where} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise RequestError(f"{where} is a {type(fields).__name__}; it must be an object")
        own = task or str(fields.get("task") or _the_task(config, "", str(path)))
        if own not in config.tasks:
            raise RequestError(
                f"{where}: there is no task {own!r}{did_you_mean(own, config.tasks)}; tasks are "
                f"{', '.join(config.tasks)}"
            )
        try:
            reward = fields.pop("reward", None)
            reward = None if reward is None else float(reward)
            if "messages" in fields:
                yield Demonstration(own, _of_messages(config.tasks[own], codec, fields["messages"]), reward)
                continue
            whole = {"task": own, "trajectory": number, "prompt_id": str(number), "seed": 0, "member": 0} | fields
            transcript = msgspec.convert(whole, Transcript, strict=False)
            given = transcript.earned if reward is None else reward
            yield Demonstration(own, _tokens_of(config, codec, transcript), given)
        except (msgspec.ValidationError, Fault, NotRendered, RequestError, TypeError, ValueError) as error:
            raise RequestError(f"{where}: {error}") from error


def _tokens_of(config: RunConfig, codec: TeachingCodec, transcript: Transcript) -> list[Turns]:
    settings = config.tasks[transcript.task]
    if settings.environment:
        if any(turn.messages or turn.calls for turn in transcript.turns):
            raise RequestError(
                f"the transcript of prompt {transcript.prompt_id} is of an environment that shows messages, which "
                "transcripts keep as text only; give a player"
            )
        return rendered(codec, transcript)
    if len(transcript.turns) > 1:
        raise RequestError(
            f"the transcript of prompt {transcript.prompt_id} has results of tools, which transcripts keep as text "
            "only; give conversations as `messages`, or a player"
        )
    chat = _chat(settings, codec)
    seen = open_dialogue(codec, chat.dialect.offered(chat.schemas)).observe(chat.messages(transcript.prompt)).tokens
    return [[(seen, codec.answer(turn.action)) for turn in transcript.turns]]


def rendered(codec: TeachingCodec, transcript: Transcript) -> list[Turns]:
    """Tokens of a transcript, exactly as an agent would have seen and said them: a list per context."""
    sequences: list[Turns] = []
    for turn in transcript.turns:
        first = not sequences or turn.fresh_context
        if first:
            sequences.append([])
        sequences[-1].append((codec.render(turn.observation, first), codec.answer(turn.action)))
    return sequences


def _chat(settings: TaskSettings, codec: Codec) -> ChatTask:
    if any(isinstance(tool, Mcp) for tool in settings.tools):
        raise RequestError("the tools of MCP servers are known when they are connected; give a player")
    return ChatTask(settings, codec)


def _of_messages(settings: TaskSettings, codec: TeachingCodec, messages: Any) -> list[Turns]:
    """Tokens of a conversation, as the dialogue of a rollout has them: a list per context."""
    said = [_message(each) for each in messages]
    if not said:
        raise ValueError("there are no messages")
    dialogue, said = _begun(settings, codec, said)
    sequences: list[Turns] = [[]]
    new: list[Message] = []
    for message in said:
        if message["role"] != "assistant":
            new.append(message)
            continue
        if not new:
            raise ValueError("an answer must follow a message that is not the assistant's")
        seen, new = dialogue.observe(new), []
        if seen.rewritten:
            sequences.append([])
        answer = codec.answer(message["content"])
        dialogue.acted(answer)
        sequences[-1].append((seen.tokens, answer))
    return [each for each in sequences if each]


def _begun(settings: TaskSettings, codec: TeachingCodec, said: list[Message]) -> tuple[Dialogue, list[Message]]:
    """The dialogue of a conversation, and its messages with a description of the tools where the template has none."""
    if not settings.environment:
        chat = _chat(settings, codec)
        dialogue = open_dialogue(codec, chat.dialect.offered(chat.schemas))
        return dialogue, chat.dialect.introduced(said, chat.schemas)
    roles = {message["role"] for message in said}
    if "tool" in roles:
        raise ValueError("the tools of an environment are known when it is played; give a player")
    # Most environments show text, which is rendered without the template's changes to the content of messages.
    return (TextDialogue(codec) if roles <= {"user", "assistant"} else open_dialogue(codec)), said


def _message(message: Any) -> Message:
    if not (isinstance(message, dict) and isinstance(message.get("content"), str)):
        raise ValueError(f"{message!r} is not a message; it needs a role and a text as its content")
    role = message.get("role")
    if role != "assistant" and role not in PROMPT_SIDE:
        raise ValueError(f"a message has the role {role!r}; roles are assistant, {', '.join(PROMPT_SIDE)}")
    if message.get("tool_calls"):
        raise ValueError("tool_calls are not read; write the calls into the content, as the model writes them")
    return {key: message[key] for key in ("role", "name", "content") if key in message}


def _fitting(config: RunConfig, demonstration: Demonstration) -> Demonstration:
    """Without the turns that do not fit into a context."""
    most = config.tasks[demonstration.task].max_context
    sequences = []
    for turns in demonstration.sequences:
        ends = _ends(turns)
        sequences.append([turn for turn, end in zip(turns, ends, strict=True) if end <= most])
    return demonstration._replace(sequences=[turns for turns in sequences if turns])


def _ends(turns: Iterable[tuple[list[int], list[int]]]) -> list[int]:
    """Length of the context after each turn."""
    length, ends = 0, []
    for observed, answered in turns:
        length += len(observed) + len(answered)
        ends.append(length)
    return ends
