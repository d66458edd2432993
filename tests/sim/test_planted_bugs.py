"""The fuzzer finds bugs: each test plants one in the control plane and asserts that a rule breaks within 500 seeds.

The product has no switch for bugs; they are patched in here.
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollart.config.modes import Mode
from rollart.config.schema import RunConfig
from rollart.config.tasks import ANY
from rollart.control.buffer import SampleBuffer
from rollart.control.context import Context
from rollart.control.elasticity import ElasticEngines
from rollart.control.environments import EnvironmentPool
from rollart.control.episode import Episode
from rollart.control.fleet import Fleet
from rollart.control.groups import Groups
from rollart.control.proxy import LLMProxy
from rollart.control.rollout import RolloutScheduler
from rollart.control.scoring import Scoring
from rollart.control.waits import Waits
from rollart.policy import admission, affinity
from rollart.policy.affinity import AffinityPolicy
from rollart.policy.buffer import BufferBook
from rollart.policy.elasticity import ElasticityPolicy
from rollart.policy.groups import GroupBook, OpenGroup
from rollart.policy.lineage import Lineage
from rollart.policy.redundancy import RedundancyBook
from rollart.policy.reward_queue import RewardQueue
from rollart.policy.routing import Router
from rollart.policy.shares import ShareBook
from rollart.policy.staleness import StalenessBound
from rollart.policy.sync import SyncBook
from rollart.policy.tickets import TicketQueue
from rollart.policy.watch import Wait
from rollart.sim.crashes import run_world
from rollart.sim.engine import SimEngine
from rollart.sim.fuzz import make_world
from rollart.types.ids import WorkerId
from rollart.types.journal import ShareRedistributed
from rollart.types.messages import EnvironmentFailed, Observed, Scored
from rollart.types.rewards import RewardRule, RewardSheet
from rollart.types.tokens import Segment
from rollart.types.trajectory import Outcome, Purpose
from rollart.types.versions import Version

SEEDS = 500


def found(rules: set[int], mode: Mode | None = None, *, near: int = 0) -> int:
    """A seed that breaks one of the rules. `near`: where the search begins, so that a run of the tests is short."""
    for offset in range(SEEDS):
        seed = (near + offset) % SEEDS
        done = run_world(make_world(seed, mode))
        broken = [violation for violation in done.violations if violation.rule in rules]
        if broken:
            return seed
    pytest.fail(f"no seed below {SEEDS} breaks any of the rules {rules}")


def patch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method by what `make` makes of it."""
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def test_the_staleness_check_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessBound, "violated", lambda *_: False)
    found({2}, Mode.ROLLART, near=5)


def test_a_slot_is_lost_when_its_environment_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(
        monkeypatch,
        EnvironmentPool,
        "release",
        lambda real: lambda self, slot, fault: real(self, slot, fault) if fault is None else None,
    )
    found({8}, near=6)


def test_a_reward_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def twice(self: Episode, truncated: bool) -> None:
        await real(self, truncated)
        self.trajectory.reward = 2 * (self.trajectory.reward or 0.0)

    real = Episode._reward
    monkeypatch.setattr(Episode, "_reward", twice)
    found({1})


def test_a_group_reward_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(real: Any) -> Any:
        def total(self: RewardSheet) -> float:
            return float(real(self)) + sum(rule.weight * self.values[rule.name] for rule in self._rules if rule.group)

        return total

    patch(monkeypatch, RewardSheet, "total", doubled)
    found({1})


def test_a_retried_group_reward_is_entered_for_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answers to a retried request are entered, because the sheet does not refuse the second."""

    def lenient(self: RewardSheet, name: str, value: float, *, defaulted: bool = False) -> None:  # noqa: ARG001
        self.values[name] = self.values.get(name, 0.0) + value

    def again(real: Any) -> Any:
        def answered(self: Scoring, rule: RewardRule, members: Any, answer: Scored) -> None:
            if rule.group and len(members) > 1:
                for member in members[:1]:
                    real(self, rule, [member], Scored(answer.key, answer.values[:1]))
            real(self, rule, members, answer)

        return answered

    monkeypatch.setattr(RewardSheet, "enter", lenient)
    patch(monkeypatch, Scoring, "_answered", again)
    found({1})


def test_a_default_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(
        monkeypatch,
        Scoring,
        "_enter",
        lambda real: lambda self, *rest, defaulted: real(self, *rest, defaulted=False),  # noqa: ARG005
    )
    found({1}, near=55)


def test_a_failed_reward_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every reward had a default."""

    def forgive(real: Any) -> Any:
        def failed(self: Scoring, rule: RewardRule, *rest: Any) -> None:
            real(self, replace(rule, default=rule.default or 0.0), *rest)

        return failed

    patch(monkeypatch, Scoring, "_failed", forgive)
    found({1}, near=28)


def test_a_member_joins_its_group_after_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are judged one by one."""

    def alone(real: Any) -> Any:
        def score_group(self: Scoring, group: Any, attempt: int, members: Any) -> None:
            for number, member in enumerate(members):
                real(self, group, 100 * attempt + number, [member])

        return score_group

    patch(monkeypatch, Scoring, "score_group", alone)
    found({1})


def test_a_group_is_compared_before_its_last_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(real: Any) -> Any:
        def settle(self: Groups, group: OpenGroup) -> None:
            if group.finished and group.enough and not group.judged and group.purpose is Purpose.TRAIN:
                self._make_ready(group)
            else:
                real(self, group)

        return settle

    patch(monkeypatch, Groups, "_settle", hasty)
    found({3}, near=15)


def test_a_version_is_stamped_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens carry the newest staged version although the engine still serves the one before."""

    def early(self: SimEngine) -> Any:
        return max([version for version in (self._version, *self._staged) if version is not None])

    monkeypatch.setattr(SimEngine, "_serving", early)
    found({4})


def test_a_group_is_filled_with_a_failed_member(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_failed(real: Any) -> Any:
        def member_ended(self: GroupBook, group: Any, trajectory: Any, outcome: Outcome) -> OpenGroup:
            kept = Outcome.COMPLETED if outcome is Outcome.ENV_FAILED else outcome
            return real(self, group, trajectory, kept)  # type: ignore[no-any-return]

        return member_ended

    patch(monkeypatch, GroupBook, "member_ended", keep_failed)
    found({1, 8})


def test_a_failed_environment_becomes_a_reward_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgiving(self: EnvironmentPool, worker: WorkerId, event: EnvironmentFailed) -> None:
        future = self._answer(worker, event.episode, event.turn)
        if future is not None:
            future.set_result(Observed(event.episode, event.turn, Segment(0, None), done=True))

    async def free_reward(self: Episode, _truncated: bool) -> None:
        self.trajectory.reward = 0.0

    monkeypatch.setattr(EnvironmentPool, "_environment_failed", forgiving)
    monkeypatch.setattr(Episode, "_reward", free_reward)
    found({1})


def test_a_wait_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def for_ever(self: Waits, wait: Wait, owner: object, *rest: Any) -> None:
        if not str(owner).startswith("environment"):
            real(self, wait, owner, *rest)

    real = Waits.open
    monkeypatch.setattr(Waits, "open", for_ever)
    found({6, 8}, near=20)


def test_a_claim_is_not_made_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(real: Any) -> Any:
        async def claim(self: SampleBuffer, trained: Any) -> Any:
            class NoFlush:
                append = self._context.sink.append

                async def flush(self) -> None:
                    pass

            sink, self._context.sink = self._context.sink, NoFlush()  # type: ignore[assignment]
            try:
                return await real(self, trained)
            finally:
                self._context.sink = sink

        return claim

    patch(monkeypatch, SampleBuffer, "_claim", forgetful)
    found({1, 8}, near=6)


def test_a_session_moves_to_an_older_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(
        monkeypatch,
        Router,
        "place",
        lambda real: lambda self, trajectory, task, _at_least, *others: real(self, trajectory, task, None, *others),
    )
    found({4}, Mode.ROLLART, near=15)


def test_shares_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def anything(self: ShareBook, ready: Any) -> dict[str, int]:
        wanted, there = sum(self.usual().values()), sum(ready.values())
        if there < wanted:
            return {next(iter(self.usual())): wanted - there}
        taken = {}
        for task in self.usual():
            taken[task] = min(ready.get(task, 0), wanted)
            wanted -= taken[task]
        self._need = taken
        return {}

    monkeypatch.setattr(ShareBook, "missing", anything)
    found({3})


def test_a_roll_back_keeps_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(real: Any) -> Any:
        def roll_back(self: Groups, step: int, generating: Any) -> None:
            ready = [group for group in self._book.groups() if group.ready]
            for group in ready:
                del self._book._groups[group.id]
            real(self, step, generating)
            for group in ready:
                self._book._groups[group.id] = group

        return roll_back

    patch(monkeypatch, Groups, "roll_back", keep)
    found({1, 2, 8}, near=31)


def test_a_roll_back_keeps_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "roll_back", lambda self, step, _: setattr(self.buffer, "steps_claimed", step))
    found({1, 2, 4}, near=31)


def test_a_roll_back_forgets_the_prompts_it_undoes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lineage, "trained_after", lambda _self, _step: [])
    found({1})


def test_an_epoch_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that comes back publishes under the number of the one before it."""
    monkeypatch.setattr(Lineage, "_epoch_started", lambda self, _event: setattr(self, "epoch", 0))
    found({1, 4, 8})


def test_a_prompt_that_waits_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(real: Any) -> Any:
        def ended(self: Groups, group: OpenGroup, outcome: Any, members: Any, cause: str) -> None:
            real(self, group, outcome, members, cause)
            self.tickets.clear()

        return ended

    patch(monkeypatch, Groups, "end", forget)
    found({1})


def test_admission_lets_too_much_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def generous(**settings: Any) -> dict[str, int]:
        return {task: count + 2 for task, count in real(**settings).items()}

    real = admission.groups_to_start
    monkeypatch.setattr("rollart.control.rollout.groups_to_start", generous)
    found({2})


def test_a_trained_group_stays_in_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(real: Any) -> Any:
        def trained(self: BufferBook, id: Any) -> Any:
            groups = real(self, id)
            for group in groups[:1]:
                self._places[group.id] = 0
                self._ready.setdefault(group.task, {})[group.id] = group
            return groups

        return trained

    patch(monkeypatch, BufferBook, "trained", keep)
    found({1, 8})


def test_a_lost_turn_is_never_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(real: Any) -> Any:
        def worker_left(self: LLMProxy, worker: Any, spec: Any, reason: str) -> None:
            real(self, worker, spec, reason)
            self._queue.clear()

        return worker_left

    patch(monkeypatch, LLMProxy, "worker_left", drop)
    monkeypatch.setattr(Episode, "stop", lambda *_: None)
    found({1, 2, 6, 8})


def test_engines_serve_what_they_have_not_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine is told at once to serve, without weights."""
    monkeypatch.setattr(SyncBook, "in_service", lambda _self, _engine: True)
    patch(
        monkeypatch,
        LLMProxy,
        "worker_joined",
        lambda real: (
            lambda self, worker, spec, info: (
                real(self, worker, spec, info),
                self._router.engine_serves(worker, Version(99, 0)),
            )[0]
        ),
    )
    found({4, 8})


def test_a_redundant_member_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def let_run(real: Any) -> Any:
        def stop(self: RolloutScheduler, trajectory: Any, outcome: Outcome, cause: str) -> None:
            if outcome is not Outcome.REDUNDANT:
                real(self, trajectory, outcome, cause)

        return stop

    patch(monkeypatch, RolloutScheduler, "stop_episode", let_run)
    found({1, 2, 8})


def test_a_prompt_that_was_lost_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits behind all others."""
    monkeypatch.setattr(TicketQueue, "put", lambda self, ticket: self._queues[ticket.prompt.task][1].append(ticket))
    found({1}, Mode.ROLLART, near=23)


def test_a_prompt_that_was_lost_too_often_gets_no_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "_starves", lambda *_: False)
    found({1}, Mode.ROLLART)


def test_a_group_is_trained_below_its_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenGroup, "enough", property(lambda self: bool(self.kept)))
    found({3}, Mode.ROLLART)


def test_a_group_is_trained_short_of_members_before_its_last_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(_: Groups, group: OpenGroup) -> bool:
        return group.purpose is Purpose.TRAIN and group.oldest_kept is not None

    monkeypatch.setattr(Groups, "_last_chance", hasty)
    found({3}, Mode.ROLLART)


def test_a_short_group_stays_ready_although_a_roll_back_made_it_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice found by the fuzzer itself, before and after the version of the roll-back was in service."""
    monkeypatch.setattr(Groups, "_withdraw_early", lambda *_: None)
    found({3}, Mode.ROLLART, near=252)


def test_redundancy_exceeds_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedundancyBook, "extra", lambda self, _task: self._limit + 1)
    found({3})


def test_a_replaced_member_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up and replaced, but its group is trained with its tokens."""

    def keep(real: Any) -> Any:
        def replace(self: Groups, group: OpenGroup, id: Any) -> None:
            self._kept[id] = trajectory = self._episodes.trajectory(id)
            trajectory.reward = 0.0
            real(self, group, id)
            group.kept[id] = trajectory.first_version

        return replace

    patch(monkeypatch, Groups, "_replace", keep)
    found({1}, Mode.ROLLART)


def test_tokens_of_a_masked_member_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(real: Any) -> Any:
        def take(self: Groups, group: Any) -> Any:
            claimed = real(self, group)
            for trajectory in claimed.trajectories:
                trajectory.masked = False
            return claimed

        return take

    patch(monkeypatch, Groups, "take", forgetful)
    found({1, 2}, Mode.ROLLART, near=37)


def test_a_group_gives_up_members_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(self: StalenessBound, served: Version, first: Version | None) -> bool:
        return first is not None and self.check_every_turn and served.step - first.step >= max(1, self.alpha)

    monkeypatch.setattr(StalenessBound, "violated", strict)
    found({2}, Mode.ROLLART)


def test_a_hung_trainer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a deadline, but far beyond the bound that the run stated."""

    def patient(self: Waits, wait: Wait, owner: object, what: str, seconds: float, action: str) -> None:
        real(self, wait, owner, what, 50 * seconds if str(owner).startswith("trainer") else seconds, action)

    real = Waits.open
    monkeypatch.setattr(Waits, "open", patient)
    found({8}, near=23)


def test_others_fill_in_for_a_task_and_nobody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(real: Any) -> Any:
        def record(self: Context, event: Any) -> None:
            if not isinstance(event, ShareRedistributed):
                real(self, event)

        return record

    monkeypatch.setattr(Context, "record", silent(Context.record))
    found({3})


def test_a_reward_worker_gets_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is then longer than the deadline of a question, and most of its requests were cancelled meanwhile."""
    patch(
        monkeypatch,
        RewardQueue,
        "join",
        lambda real: lambda self, worker, slots, tasks: real(self, worker, 1000 * slots, tasks),
    )
    found({8}, near=65)


def test_a_worker_that_leaves_gets_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(real: Any) -> Any:
        def without(self: Fleet, worker: WorkerId, why: str) -> None:
            spawn, self._spawn = self._spawn, lambda _: None  # type: ignore[method-assign]
            real(self, worker, why)
            self._spawn = spawn  # type: ignore[method-assign]

        return without

    patch(monkeypatch, Fleet, "_leaves", leaves)
    found({8}, near=12)


def test_the_turns_of_an_engine_that_leaves_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(real: Any) -> Any:
        def forgetful(self: LLMProxy, worker: WorkerId, spec: Any, reason: str) -> None:
            if reason == "its node drains":
                for request, session in list(self._turns.items()):
                    if session.engine is self._engines.get(worker):
                        del self._turns[request]
            real(self, worker, spec, reason)

        return forgetful

    patch(monkeypatch, LLMProxy, "worker_left", left)
    patch(
        monkeypatch,
        LLMProxy,
        "worker_leaves",
        lambda real: lambda self, worker: (real(self, worker), self._fleet.finished(worker)),
    )
    found({1, 6, 8}, near=11)


def test_tasks_flap_between_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that has moved does not stay."""
    monkeypatch.setattr(affinity, "MAX_HOLDS", 0)
    found({9}, Mode.ROLLART, near=61)


def test_a_task_waits_for_a_class_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AffinityPolicy, "_lost", lambda *_: None)
    found({9}, Mode.ROLLART, near=20)


def test_a_declared_class_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_tasks(self: RunConfig) -> dict[str, tuple[str, ...]]:
        classes = tuple(self.hardware_classes())
        return {name: classes for name, task in self.tasks.items() if task.hardware != ANY}

    monkeypatch.setattr(RunConfig, "automatic_tasks", all_tasks)
    found({9}, Mode.ROLLART)


def test_a_removed_engine_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are thrown away instead of being drained."""

    def retire(self: Fleet, name: str, why: str) -> None:  # noqa: ARG001
        self._aside[name] = self._specs.pop(name)
        for worker in [worker for worker, spec in self._alive.items() if spec.name == name]:
            self._runtime.stop(worker)

    monkeypatch.setattr(Fleet, "retire", retire)
    found({10}, near=14)


def test_a_removed_engine_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart of a worker that died is not cancelled, so that there are more engines than decided."""

    def retire(real: Any) -> Any:
        def without(self: Fleet, name: str, why: str) -> None:
            real(self, name, why)
            self._specs[name] = self._aside[name]

        return without

    patch(monkeypatch, Fleet, "retire", retire)
    found({10}, near=14)


def test_pools_flap_with_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes for nodes are not confirmed."""

    def hasty(real: Any) -> Any:
        def nodes(self: ElasticityPolicy, pools: Any, now: float) -> Any:
            rules, self._rules = self._rules, replace(self._rules, confirm_s=0.0)
            resize = real(self, pools, now)
            self._rules = rules
            return resize

        return nodes

    patch(monkeypatch, ElasticityPolicy, "_nodes", hasty)
    found({10}, near=6)


def test_a_pool_that_lost_its_nodes_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(
        monkeypatch,
        ElasticityPolicy,
        "_nodes",
        lambda real: (
            lambda self, pools, now: resize if (resize := real(self, pools, now)) is None or resize.before else None
        ),
    )
    found({10}, near=47)


def test_the_trainer_gets_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for a node, engines take what becomes free."""
    patch(
        monkeypatch,
        ElasticEngines,
        "_situation",
        lambda real: lambda self: real(self)._replace(blocked=(), trainer=()),
    )
    found({8, 10}, near=300)
