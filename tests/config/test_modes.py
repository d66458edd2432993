"""The five modes are what the table in their docstring says."""

import pytest

import rollart.config.modes
from rollart.config.modes import MODES, Mode, ModeSettings


def table() -> dict[str, dict[str, bool]]:
    """The docstring's table: which settings are on in which mode."""
    lines = (rollart.config.modes.__doc__ or "").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("mode "))
    rows: dict[str, dict[str, bool]] = {}
    for line in lines[start + 1 :]:
        if line.strip():
            mode = line.split()[0]
            rows[mode] = {
                "environment_barrier": "batch barrier" in line,
                "reward_after_rollout": "at the end" in line,
                "overlap": "beside rollout" in line,
                "interrupt": "interrupt" in line,
                "check_every_turn": "at every turn" in line or "(always 0)" in line,
                "affinity": line.endswith(" on"),
            }
    return rows


def test_the_table_is_the_settings() -> None:
    assert table() == {mode.value: settings.model_dump() for mode, settings in MODES.items()}


def test_every_mode_has_its_settings() -> None:
    assert list(MODES) == list(Mode)
    assert [mode.value for mode in Mode] == ["sync", "sync_plus", "one_off", "areal", "rollart"]


@pytest.mark.parametrize("mode", Mode)
def test_what_every_mode_keeps_to(mode: Mode) -> None:
    settings = MODES[mode]
    assert settings.overlap or not settings.interrupt, "nothing to interrupt where training waits for rollout"
    assert not (settings.environment_barrier and settings.overlap)
    assert settings.affinity == (mode is Mode.ROLLART)


def test_the_modes_are_five_different_things() -> None:
    assert len({tuple(settings.model_dump().items()) for settings in MODES.values()}) == len(Mode)


def test_settings_do_not_change_and_are_complete() -> None:
    with pytest.raises(ValueError, match="frozen"):
        MODES[Mode.SYNC].overlap = True  # type: ignore[misc]
    with pytest.raises(ValueError, match="affinity"):
        ModeSettings(
            environment_barrier=True, reward_after_rollout=True, overlap=True, interrupt=True, check_every_turn=True
        )  # type: ignore[call-arg]
