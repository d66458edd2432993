"""A real run whose rewards are computed by Ray actors."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

import rollart


class Echo:
    """One turn."""

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        return f"say {seed}", {}

    def step(self, action):
        return f"heard {len(action)}", 0.5, True, False, {}


def letters(t: rollart.Transcript) -> float:
    return sum(char.isalpha() for char in t.final_text) / 8


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_run_with_rewards_in_actors(tmp_path: Path) -> None:
    reward = {"function": letters, "run": "actors", "slots": 2}
    task = rollart.Task(Echo, rewards=[reward], max_turns=1, max_turn_tokens=8, environments=16)
    result = rollart.run(
        tasks={"echo": task},
        model=rollart.tiny_model(),
        batch={"trajectories": 32, "group_size": 4},
        steps=4,
        runtime="ray",
        out=tmp_path / "run",
    )
    use = result.report.functions["echo/letters"]
    assert use.calls >= 64
    assert use.failed == 0
    assert 1 <= use.cold_starts <= 2
    assert list((tmp_path / "run" / "logs").rglob("*replica-0.log"))
