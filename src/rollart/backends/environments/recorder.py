"""Recorder: the transcript of the current episode of one environment, turn by turn.

Texts are those that the environment gave and got: nothing is decoded again. A transcript is packed once, with the
observation that ends the episode, be it by the environment's word or at a limit of the agent.
"""

from rollart.config.tasks import TaskSettings
from rollart.ports.environment import TextStep
from rollart.types.chat import readable
from rollart.types.messages import Reset
from rollart.types.transcript import Transcript, TranscriptTurn, Truncation, pack


class Recorder:
    """Used by the environment's own thread."""

    def __init__(self, task: str, settings: TaskSettings) -> None:
        self._task = task
        self._settings = settings
        self._turns: list[TranscriptTurn] = []
        self._context = 0
        """Length of the sequence in tokens, as the controller counts it."""

    def reset(self, reset: Reset) -> None:
        self._reset = reset
        self._turns.clear()
        self._context = 0

    def acted(self, seen: TextStep, action: str, tokens: int, step: TextStep) -> None:
        """The agent saw `seen`, answered it with `action`, and the environment went on to `step`."""
        self._turns.append(
            TranscriptTurn(
                readable(seen.observation),
                action,
                float(step.reward),
                seen.state,
                bool(seen.fresh_context),
                step.calls,
                not isinstance(seen.observation, str),
            )
        )
        self._context += tokens

    def observed(self, step: TextStep, tokens: int) -> bytes:
        """The packed transcript if the episode ends with this observation, of that many tokens; else empty."""
        if step.done and not step.truncated:
            return self._packed(step, None)
        self._context = tokens if step.fresh_context else self._context + tokens
        limit = self._settings.limit_reached(len(self._turns), self._context)
        if step.done:
            return self._packed(step, Truncation.ENVIRONMENT)
        return b"" if limit is None else self._packed(step, limit)

    def _packed(self, last: TextStep, truncated: Truncation | None) -> bytes:
        prompt = self._reset.prompt
        return pack(
            Transcript(
                task=self._task,
                trajectory=self._reset.episode,
                prompt_id=prompt.id,
                seed=prompt.seed,
                member=self._reset.member,
                prompt=prompt.data,
                turns=tuple(self._turns),
                final_observation=readable(last.observation),
                truncated=truncated,
                artifact=last.artifact,
            )
        )
