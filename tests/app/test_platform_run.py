"""The quickstart's arithmetic learns with its reward on Ray Serve, unchanged, from no replica on."""

from pathlib import Path

import pytest
from platform_process import running_platform

import rollart
from rollart.cli.train import config_file
from rollart.config.load import load_toml
from rollart.config.tasks import EPISODE_RETURN
from rollart.observe.journal import fold_journal, read_journal
from rollart.types.journal import StepTrained, TrajectoryEnded
from rollart.types.trajectory import TRAINABLE, Outcome

pytest.importorskip("fastapi", reason="Ray Serve is not installed: make test-functions")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
SECRET = "a-secret-of-the-platform"
STEPS = 30


def arithmetic_alone(url: str) -> dict[str, object]:
    """The quickstart without its other tasks; the reward is that of its task `math`, behind this URL."""
    tables = load_toml(config_file("quickstart"))
    reward = {"function": EPISODE_RETURN, "run": url, "secret": "PLATFORM_SECRET"}
    math = tables["tasks"]["math"] | {"hardware": "any", "eval_episodes": 200, "rewards": [reward]}
    return tables | {
        "tasks": {"math": math},
        "pools": {"bandwidth": tables["pools"]["bandwidth"]},
        "model": {"cold_start": {"tasks": {"math": 3800}}},
        "batch": {"trajectories": 64, "group_size": 8},
        "trainer": tables["trainer"] | {"schedule": tables["trainer"]["schedule"] | {"total_steps": 2 * STEPS}},
        "steps": STEPS,
        "eval_every": STEPS,
        "checkpoint_every": STEPS,
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_with_its_reward_on_the_platform_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATFORM_SECRET", SECRET)
    options = ["--max-replicas=2", "--idle-s=1", "--cpus=0.1"]
    with running_platform(EPISODE_RETURN, tmp_path, SECRET, *options) as platform:
        assert platform.health()["replicas"] == 0
        result = rollart.run(arithmetic_alone(platform.url), runtime="ray", out=tmp_path / "run")
        paid = platform.wait_until_idle()
    before, after = result.held_out["math"].before, result.held_out["math"].after
    print(f"held out: {before:.2f} → {after:.2f}; {paid}")  # noqa: T201
    assert after > before + 0.1

    journal = tmp_path / "run" / "journal.sqlite"
    assert fold_journal(journal)[1].finish()[0] == []
    events = list(read_journal(journal))
    assert sum(isinstance(event, StepTrained) for event in events) == STEPS
    ended = [event for event in events if isinstance(event, TrajectoryEnded)]
    assert not any(event.outcome is Outcome.REWARD_FAILED for event in ended)
    used = result.report.functions["math/episode_return"]
    assert (used.failed, used.fallbacks) == (0, 0)
    assert used.cold_starts >= 1
    assert paid["cold_starts"] >= 1
    # All rewards come from the platform; it may have computed more, for trajectories that were stopped meanwhile.
    assert STEPS * 64 <= sum(event.outcome in TRAINABLE for event in ended) <= paid["executed"]
