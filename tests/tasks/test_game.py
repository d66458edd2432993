import pytest

from rollart.tasks.game import GuessTheNumber
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt


def game(seed=5, **settings):
    environment = GuessTheNumber(**settings)
    first = environment.reset(Prompt("p", "game", seed)).observation
    low, high = map(int, first.splitlines()[-1].split("-"))
    return environment, low, high


def secret(seed=5):
    """Found by trying all."""
    low, high = game(seed)[1:]
    return next(number for number in range(low, high + 1) if game(seed)[0].step(str(number)).reward)


def test_hints_leave_what_is_possible():
    number = secret()
    environment, low, high = game()
    assert (high - low, low >= 10, high <= 99) == (30, True, True)
    assert environment.step(f"I say {number - 2}!").observation == f"higher {number - 1}-{high}"
    assert environment.step(str(number + 3)).observation == f"lower {number - 1}-{number + 2}"
    assert environment.step("11").observation == f"higher {number - 1}-{number + 2}"
    assert environment.step("999").observation == f"lower {number - 1}-{number + 2}"
    last = environment.step(str(number))
    assert (last.observation, last.reward, last.done, last.truncated) == ("yes", 1.0, True, False)


def test_the_last_guess_ends_it():
    environment, low, high = game(guesses=2)
    assert not environment.step("well").done
    last = environment.step("")
    assert (last.observation, last.reward, last.done) == (f"Say a number. {low}-{high}", 0.0, True)
    with pytest.raises(EnvironmentFault, match="reset"):
        environment.step("1")


def test_the_seed_is_the_game():
    games = {(game(seed)[1], secret(seed)) for seed in range(30)}
    assert len(games) > 20
    assert secret(3) == secret(3)


@pytest.mark.parametrize("settings", [{"numbers": 91}, {"numbers": 0}, {"guesses": 0}])
def test_an_impossible_game_is_refused(settings):
    with pytest.raises(RequestError, match="use 1 to 90"):
        GuessTheNumber(**settings)


def test_it_can_be_closed_at_any_time():
    environment = GuessTheNumber()
    environment.close()
    with pytest.raises(EnvironmentFault, match="reset"):
        environment.step("50")
