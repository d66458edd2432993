"""A whole run while its nodes join and leave ten times: engines follow, and nothing is lost.

It takes several minutes: `make test-long`.
"""

from itertools import pairwise

import pytest
from node_runs import CONFIG, Run, now
from ray_nodes import RayNodes

from rollart.types.journal import EnginesChanged, EngineUpdated, StepTrained, TrajectoryEnded, WorkerDied
from rollart.types.trajectory import Outcome

pytestmark = pytest.mark.long

TIMES = 10
LOST = (Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED)
FOLLOWS_S = 240.0
STALLED_S = 60.0
"""Far longer than it takes to notice a dead node and go on with what is left."""
GOES_ON = 2
"""Steps trained while a node is away, and again while a new engine starts: one step at most waited for either."""
ELASTIC = CONFIG.replace("engines = 2", "engines = 1") + "\n[elasticity]\nconfirm_s = 3.0\n"
ELASTIC = ELASTIC.replace("[pools.H20]", "[pools.H20]\nengines = { min = 0, max = 2 }")


@pytest.fixture
def cluster():
    with RayNodes("cpu", "H800", "H20", gpus=2) as nodes:
        yield nodes


def test_nodes_join_and_leave_ten_times(cluster):
    """The node of the elastic pool is killed and terminated in turn, and comes back each time.

    That training does not wait is shown by steps between events, not by seconds: starting nodes keeps the machine busy.
    """
    left_at = []
    with Run(cluster, ELASTIC) as run:
        run.until(lambda events: serving(events, 0.0), FOLLOWS_S)
        for number in range(TIMES):
            run.until_steps(3, FOLLOWS_S)
            left_at.append(now(run))
            if number % 2:
                cluster.terminate(2)
            else:
                cluster.nodes[2].kill()
            run.until(lambda events: changed(events, left_at[-1], grows=False), FOLLOWS_S)
            run.until_steps(3, FOLLOWS_S)
            back_at = now(run)
            if not number % 2:
                cluster.nodes[2].start()
            cluster.start_ray(2)
            run.until(
                lambda events, since=back_at: changed(events, since, grows=True) and serving(events, since), FOLLOWS_S
            )
        run.until_steps(3, FOLLOWS_S)
        events = run.finish()
    assert not [event for event in events if isinstance(event, TrajectoryEnded) and event.outcome in LOST]
    assert len(changed(events, 0.0, grows=True)) >= TIMES
    trained_at = [event.at for event in events if isinstance(event, StepTrained)]
    for left, gone, back, serves in absences(events, left_at):
        away, starting = (sum(a < at < b for at in trained_at) for a, b in ((gone, back), (back, serves)))
        assert min(away, starting) >= GOES_ON, (left, gone, back, serves, away, starting)
    steps_s = [later - earlier for earlier, later in pairwise(trained_at)]
    assert max(steps_s) < STALLED_S, sorted(steps_s)[-TIMES:]


def changed(events, since, *, grows):
    """Whether the elastic pool lost all of its engines since a point in time, or has some again.

    It need not have the maximum: engines that wait for training are released.
    """
    changes = [event for event in events if isinstance(event, EnginesChanged) and event.at > since]
    if grows:
        return [event for event in changes if event.after > event.before == 0]
    # An engine that died with its node for the second time is removed, and may be added again once a node joins.
    dead = [event for event in events if isinstance(event, WorkerDied) and event.at > since]
    return [event for event in changes if not event.after] + [event for event in dead if "removed" in event.action]


def absences(events, left_at):
    """When the node left, when its engines were given up, when the pool grew again, and when it served again."""
    for left in left_at:
        gone = min(event.at for event in changed(events, left, grows=False))
        back = min(event.at for event in changed(events, gone, grows=True))
        yield left, gone, back, min(event.at for event in serving(events, back))


def serving(events, since):
    """Whether an engine of the elastic pool is in service since a point in time."""
    return [e for e in events if isinstance(e, EngineUpdated) and e.at > since and e.worker.startswith("engine/H20/")]
