"""First split of devices: the shortest step among those that fit, with declared numbers kept."""

from typing import Any

import pytest

from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.policy.devices import Costs, Split, best_split, estimated, tokens_per_step
from rollart.policy.memory import ModelSize, engine_memory, total, trainer_memory
from rollart.types.placement import ACCELERATOR, Needs, Node

GPU = Needs(gpus=1, labels={ACCELERATOR: "H800"}, pool="H800")
RANK = Needs(gpus=1, labels={ACCELERATOR: "H800"}, pool="H800")
QWEN_8B = ModelSize(8_190_000_000, 36, 4096, 12288, 151_936, 147_456)


def config(engines: Any = "auto", ranks: Any = "auto", **changes: Any) -> RunConfig:
    tables: dict[str, Any] = {
        "tasks": {"swe": {"max_turns": 10, "max_turn_tokens": 100, "max_context": 4000}},
        "pools": {"H800": {"engines": engines, "accelerator": "H800", "ranks": 1, "dtype": "bfloat16"}},
        "batch": {"trajectories": 64, "group_size": 8},
        "trainer": {"ranks": ranks, "device": "cuda", "pool": "H800", "dtype": "bfloat16"},
    }
    return check(RunConfig, tables | changes)


def nodes(count: int = 1, gpus: int = 8) -> list[Node]:
    total = {"GPU": float(gpus), "CPU": 64.0}
    return [Node(f"n{number}", "", {ACCELERATOR: "H800"}, total, {}) for number in range(count)]


def split(made: RunConfig, costs: Costs, there: list[Node], **options: int) -> Split:
    return best_split(made, costs, {"H800": GPU}, RANK, there, **options)


@pytest.mark.parametrize(
    ("training", "rollout", "expected"),
    [(10.0, 10.0, (4, 4)), (10.0, 30.0, (2, 6)), (30.0, 10.0, (6, 2)), (1000.0, 1.0, (7, 1)), (1.0, 1000.0, (1, 7))],
)
def test_devices_are_split_by_cost(training: float, rollout: float, expected: tuple[int, int]) -> None:
    found = split(config(), Costs(training, {"H800": rollout}, measured=True), nodes())
    assert (found.ranks, found.engines["H800"]) == expected
    assert found.step_s == max(training / expected[0], rollout / expected[1])


def test_without_overlap_both_add_up() -> None:
    found = split(config(mode="sync"), Costs(10.0, {"H800": 10.0}, measured=True), nodes())
    assert (found.ranks, found.engines["H800"], found.step_s) == (4, 4, 5.0)


def test_devices_that_bring_nothing_stay_free() -> None:
    found = split(config(ranks=1), Costs(10.0, {"H800": 20.0}, measured=True), nodes())
    assert (found.ranks, dict(found.engines)) == (1, {"H800": 2})


@pytest.mark.parametrize(
    ("engines", "ranks", "expected"),
    [(3, "auto", (3, 3)), ("auto", 6, (6, 2)), ({"max": 2}, "auto", (2, 2)), ({"max": 9, "start": 1}, "auto", (1, 1))],
)
def test_declared_numbers_are_kept(engines: Any, ranks: Any, expected: tuple[int, int]) -> None:
    found = split(config(engines, ranks), Costs(1000.0, {"H800": 1000.0}, measured=True), nodes())
    assert (found.ranks, found.engines["H800"]) == expected
    assert found.fits


def test_the_trainer_has_at_least_the_ranks_that_its_memory_needs() -> None:
    found = split(config(), Costs(1.0, {"H800": 1000.0}, measured=True), nodes(), least_ranks=3)
    assert (found.ranks, found.engines["H800"]) == (3, 5)


def test_what_does_not_fit_is_told_apart() -> None:
    found = split(config(12, 1), Costs(1.0, {"H800": 1.0}, measured=True), nodes())
    assert not found.fits
    assert dict(found.engines) == {"H800": 12}


def test_devices_are_shared_where_both_reserve_a_part() -> None:
    """One GPU: training and an engine."""
    half = Needs(gpus=0.5, labels={ACCELERATOR: "H800"})
    costs = Costs(1.0, {"H800": 1.0}, measured=True)
    found = best_split(config(), costs, {"H800": half}, half, nodes(gpus=1))
    assert (found.ranks, dict(found.engines), found.fits) == (1, {"H800": 1}, True)
    assert not best_split(config(), costs, {"H800": GPU}, RANK, nodes(gpus=1)).fits


def test_memory_of_a_rank_falls_with_the_number_of_ranks() -> None:
    one, eight = (trainer_memory(QWEN_8B, config(), ranks) for ranks in (1, 8))
    parts = {part.name: part.nbytes for part in one}
    assert parts["weights"] == parts["gradients"] == 4 * QWEN_8B.parameters
    assert parts["optimiser"] == 8 * QWEN_8B.parameters
    assert {part.name: part.nbytes for part in eight}["optimiser"] == QWEN_8B.parameters
    assert total(eight) < total(one) / 4


def test_checkpointing_and_lora_need_less() -> None:
    plain = total(trainer_memory(QWEN_8B, config(), 1))
    for change in ({"gradient_checkpointing": True}, {"lora": {"rank": 16}}):
        made = config(trainer={"device": "cuda", "pool": "H800", "dtype": "bfloat16", **change})
        assert total(trainer_memory(QWEN_8B, made, 1)) < plain


def test_memory_of_an_engine_holds_two_versions() -> None:
    pool = config().pools["H800"]
    parts = {part.name: part.nbytes for part in engine_memory(QWEN_8B, pool)}
    assert parts["weights"] == parts["next version"] == 2 * QWEN_8B.parameters
    assert parts["KV"] == pool.kv_mib * 2**20


def test_estimates_follow_from_the_data_sheet() -> None:
    made = config()
    tokens = tokens_per_step(made)
    assert tokens == (64 * 500, 64 * 750)
    costs = estimated(made, QWEN_8B, {"H800": GPU}, RANK)
    assert costs.training == pytest.approx(6 * 8.19e9 * sum(tokens) / (989.5e12 * 0.4))
    prompts = 2 * 8.19e9 * tokens.prompt / (989.5e12 * 0.55)
    decoding = tokens.sampled * 2 * 8.19e9 / (3.35e12 * 0.75) / 16  # 16 environments
    assert costs.rollout["H800"] == pytest.approx(prompts + decoding)
