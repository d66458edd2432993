"""The two pinned environments agree, so that a controller in one of them can use engines in the other."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDER_FOR_VLLM = {"numpy", "transformers"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))


def test_what_both_environments_have_is_the_same_version() -> None:
    ours, with_vllm = pins("constraints.txt"), pins("requirements-vllm.txt")
    differ = {name for name in ours.keys() & with_vllm.keys() if ours[name] != with_vllm[name]}
    assert differ == OLDER_FOR_VLLM
    assert {"ray", "gymnasium", "tensorboardx", "torch", "msgspec"} <= ours.keys() & with_vllm.keys()
