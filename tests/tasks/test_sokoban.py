"""Sokoban: rules, generated puzzles, what is earned, and how episodes end."""

import random

import pytest

from rollart.tasks.builtin import BUILT_IN
from rollart.tasks.prompts import SeedPrompts
from rollart.tasks.scripts import mean_reward, play
from rollart.tasks.sokoban import HINT, LEVELS, RULES, SOLVED, SPENT, STUCK, Sokoban, offset, parsed, picture, solver
from rollart.tasks.sokoban_rules import Position, moved, pushes_needed, puzzle, solution, solved
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt

ROOM = """\
######
#@---#
#-$--#
#---.#
#----#
######"""
"""Solved by D R, R, then around the box and D."""


def prompt(seed):
    return Prompt(str(seed), "sokoban", seed)


def playing(layout, level=1, **settings):
    """An environment in the middle of a puzzle of our own."""
    environment = Sokoban(level, **settings)
    environment._layout = lambda _: layout
    environment.reset(prompt(0))
    return environment


def test_a_box_is_pushed_and_never_pulled_or_pushed_in_pairs():
    room, start = parsed("#######\n#@$-$.#\n#.----#\n#######")
    right, left = room.steps["R"], room.steps["L"]
    once = moved(room, start, right)
    assert picture(room, once).splitlines()[1] == "#-@$$.#"
    assert moved(room, once, right) is None
    back = moved(room, once, left)
    assert back.boxes == once.boxes
    assert moved(room, start, room.steps["U"]) is None


def test_dead_cells_are_those_from_which_no_push_leads_to_a_target():
    room, _ = parsed("######\n#---.#\n#-$@-#\n#----#\n######")
    alive = pushes_needed(room)
    top = {7, 8, 9, 10}
    assert {cell for cell, pushes in alive.items() if pushes == 0} == {10}
    assert {cell: alive[cell] for cell in sorted(alive) if cell in top} == {8: 2, 9: 1, 10: 0}
    assert 25 not in alive, "a box in a lower corner stays there"


@pytest.mark.parametrize("level", LEVELS)
def test_puzzles_are_solvable_within_their_moves(level):
    shape = LEVELS[level]
    for seed in range(20 if level < 3 else 4):
        room, start = puzzle(shape, random.Random(seed))
        assert len(start.boxes) == len(room.targets) == shape.boxes
        assert not room.targets.intersection(start.boxes)
        assert start.player not in start.boxes
        moves = solution(room, start)
        assert 0 < len(moves) <= shape.moves
        here = start
        for move in moves:
            here = moved(room, here, room.steps[move])
        assert solved(room, here)


def shortest(room, start):
    """Length of a shortest solution, by breadth-first search without any bound."""
    seen, waiting = {start}, [start]
    for moves in range(100):
        if any(solved(room, here) for here in waiting):
            return moves
        after = {there for here in waiting for step in room.steps.values() if (there := moved(room, here, step))}
        waiting = list(after - seen)
        seen |= after
    return None


def test_solutions_are_shortest():
    for seed in range(30):
        room, start = puzzle(LEVELS[1], random.Random(seed))
        assert len(solution(room, start)) == shortest(room, start)


def test_the_solver_knows_what_cannot_be_solved():
    room, start = parsed("######\n#$--@#\n#---.#\n#----#\n#----#\n######")
    assert solution(room, start) is None
    room, start = parsed("#####\n#@--#\n#-$-#\n#.--#\n#####")
    assert solution(room, Position(start.player, (start.boxes[0],))) is not None


def test_observations_have_the_cells_and_the_moves_that_are_not_blocked():
    environment = Sokoban()
    for seed in range(10):
        step = environment.reset(prompt(seed))
        rules, *rows, line = step.observation.splitlines()
        assert rules == RULES
        room, here = parsed("\n".join(rows))
        for move in solution(room, here)[:-1]:
            target = next(iter(room.targets))
            cells = [f"@{here.player // 6}{here.player % 6}", f"${offset(room, here.player, here.boxes[0])}"]
            cells.append(f".{offset(room, here.boxes[0], target)}")
            assert line.split()[:3] == cells
            opened = {letter for letter, step in room.steps.items() if moved(room, here, step)}
            assert set(line.rpartition(":")[2]) == opened
            here = moved(room, here, room.steps[move])
            line = environment.step(move).observation


def test_the_other_levels_show_the_map_at_every_turn():
    environment = Sokoban(2)
    environment.reset(prompt(1))
    rows = environment.step("L").observation.splitlines()
    assert len(rows) == LEVELS[2].size + 1
    assert picture(*parsed("\n".join(rows[:-1]))) == "\n".join(rows[:-1])


def test_several_moves_in_one_answer_are_played_until_the_end():
    environment = playing(ROOM)
    step = environment.step("I say DRUURRDLLL")
    assert (step.observation, step.reward, step.done) != (SOLVED, 1.0, True)
    environment = playing(ROOM)
    assert environment.step("DR").reward == 0
    final = environment.step("R")
    assert not final.done
    final = environment.step("URDLLLLL")
    assert (final.observation, final.reward, final.done, final.truncated) == (SOLVED, 1.0, True, False)


def test_nonsense_is_answered_and_moves_nothing():
    environment = playing(ROOM)
    before = environment.step("?").state
    for nonsense in ("", "left", "LEFT", "l", "\N{REPLACEMENT CHARACTER}", "Down"):
        step = environment.step(nonsense)
        assert step.observation.startswith(HINT)
        assert (step.state, step.reward, step.done) == (before, 0.0, False)


def test_a_box_on_a_target_earns_once_and_leaving_gives_it_back():
    environment = playing("#######\n#@$.--#\n#--$-.#\n#-----#\n#######", level=2)
    assert environment.step("R").reward == 1 / 8
    assert environment.step("R").reward == -1 / 8
    assert environment.step("L").reward == 0


def test_rewards_of_a_solved_puzzle_add_up_to_one_exactly():
    for level, count in ((1, 20), (2, 20), (3, 2)):
        for seed in range(count):
            played = play(Sokoban(level), prompt(seed), solver, max_turns=LEVELS[level].moves)
            assert played.reward == 1.0


@pytest.mark.parametrize(("deadlock", "done"), [("end", True), ("continue", False)])
def test_a_deadlock_ends_the_episode_unless_it_may_go_on(deadlock, done):
    environment = playing("######\n#.---#\n#--@-#\n#--$-#\n#----#\n######", deadlock=deadlock)
    step = environment.step("D")
    assert (step.done, step.truncated, step.reward) == (done, False, 0.0)
    assert (step.observation == STUCK) == done


def test_moves_that_are_used_up_truncate_the_episode():
    environment = playing(ROOM)
    limit = LEVELS[1].moves
    for _ in range(limit - 1):
        assert not environment.step("U").done
    last = environment.step("U")
    assert (last.observation, last.done, last.truncated, last.reward) == (SPENT, True, True, 0.0)
    with pytest.raises(EnvironmentFault, match="reset"):
        environment.step("U")


def test_the_last_move_may_solve_it():
    environment = playing(ROOM)
    environment.step("U" * (LEVELS[1].moves - 6))
    step = environment.step("DRRURD")
    assert (step.observation, step.reward, step.truncated) == (SOLVED, 1.0, False)


def test_what_does_not_exist_is_refused():
    with pytest.raises(RequestError, match="levels are 1, 2, 3"):
        Sokoban(level=4)
    with pytest.raises(RequestError, match="'end' or 'continue'"):
        Sokoban(deadlock="stop")
    environment = Sokoban()
    environment.close()
    with pytest.raises(EnvironmentFault, match="reset"):
        environment.step("R")


def test_scripts_reach_what_the_docs_say_at_level_2():
    source = SeedPrompts("sokoban", 0, 60, held_out=True)
    prompts = [source.next() for _ in range(60)]
    expected = {"any move": 0.04, "open move": 0.03, "greedy": 0.26, "solver": 1.0}
    for name, script in BUILT_IN["sokoban"].baselines.items():
        reached = mean_reward(Sokoban(2), prompts, script, max_turns=LEVELS[2].moves)
        assert reached == pytest.approx(expected[name], abs=0.1), name
