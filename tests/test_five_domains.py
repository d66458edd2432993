"""The mix of the paper's five domains: what its config says, and two small steps of it in real processes' places."""

import json
from pathlib import Path

from real_cli import rollart
from sandbox_parts import usable

from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig
from rollart.tasks.builtin import BUILT_IN
from rollart.tasks.sandboxes import shared_sandboxes

DOMAINS = {"repair": "H800", "shop": "H800", "frozenlake": "H800", "python_math": "H20", "game": "H20"}
CONFIG = Path(__file__).parents[1] / "examples" / "five_domains.toml"


def test_it_has_the_five_domains_with_the_papers_mapping():
    config = check(RunConfig, load_toml(CONFIG))
    assert {name: task.hardware for name, task in config.tasks.items()} == DOMAINS
    assert set(config.pools) == {"H800", "H20"}
    assert sum(config.groups_per_batch().values()) == config.groups
    for name, task in config.tasks.items():
        assert task.environment == BUILT_IN[name].factory
        assert task.max_turns >= BUILT_IN[name].max_turns
        assert task.max_turn_tokens >= BUILT_IN[name].max_turn_tokens
        assert task.eval_episodes
    assert isinstance(config.model, dict)
    cold_start = config.model["cold_start"]
    assert set(cold_start["tasks"]) == set(config.tasks)
    assert max(task.max_context for task in config.tasks.values()) < cold_start["config"]["max_position_embeddings"]


def test_two_small_steps(tmp_path):
    """All five tasks, both pools and real sandboxes, with a model that has hardly learned to speak."""
    usable(shared_sandboxes())
    small = {
        "steps": 2,
        "eval_every": 0,
        "model.cold_start.steps": 3,
        "model.cold_start.tasks": dict.fromkeys(DOMAINS, 3),
        "batch": {"trajectories": 20, "group_size": 4},
        "algorithm": {"advantage": '"gigpo"'},
        **{f"tasks.{name}.{key}": value for name in DOMAINS for key, value in (("environments", 4), ("share", 1))},
    }
    words = [word for key, value in small.items() for word in ("--set", f"{key}={_toml(value)}")]
    done = rollart("train", CONFIG, "--runtime", "inline", "--json", "--out", tmp_path / "run", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    audit = rollart("audit", tmp_path / "run", cwd=tmp_path)
    assert audit.code == 0, audit.out + audit.err


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
