"""Reports as tables on a terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rollart.app.cluster_doctor import NodeHealth, own_versions
from rollart.app.tables import PlainTable
from rollart.config.schema import RunConfig
from rollart.control.fleet import WorkerSpec
from rollart.observe.bias import Compared, warnings
from rollart.observe.report import Report
from rollart.observe.report_parts import Redundancy
from rollart.observe.steady import Steady
from rollart.policy.placement import Planned
from rollart.types.journal import EvalEnded, TimeUse
from rollart.types.reward_use import RewardUse

if TYPE_CHECKING:
    from rollart.app.devices import DevicePlan

Baselines = Mapping[str, Mapping[str, float]]
"""Scores of scripted policies on the held-out prompts of a task, worst first."""


def show_report(console: Console, report: Report, baselines: Baselines | None = None) -> None:
    """Show the report of one run."""
    console.print(
        f"[bold]{escape(report.name)}[/] · {report.mode} · α = {report.alpha} · seed {report.seed} · "
        f"{report.steps} steps in {_seconds(report.seconds)}"
    )
    console.print(_figures(report))
    console.print(_pools(report))
    if report.steady.stepping:
        console.print(_steady(report.steady))
    console.print(_counts(report))
    for functions in _functions(report.functions):
        console.print(functions)
    if report.evaluations:
        console.print(_learned(report, baselines or {}))


def show_plan(console: Console, config: RunConfig, workers: Sequence[WorkerSpec]) -> None:
    """Show what a run would do: its config with all defaults, and the placement of its workers."""
    console.print_json(config.model_dump_json(exclude_defaults=False))
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("workers", "pool", "hardware", "what it is"):
        table.add_column(column)
    for (role, pool, hardware, factory), names in _alike(workers).items():
        table.add_row(f"{len(names)} {role}", pool, hardware or "any", factory.partition(":")[2])
    console.print(table)
    for task, settings in config.tasks.items():
        declared, others = config.declared_class(task), config.fallback_of(task)
        found = task in config.automatic_tasks()
        classes = " or ".join(others) + " (auto)" if found else ", then ".join([*filter(None, [declared]), *others])
        console.print(
            f"{task}: {config.groups_per_batch()[task]} of {config.groups} groups of {config.batch.group_size}, "
            f"{settings.environments} environments, turns on {classes or 'any engine'}",
            markup=False,
            highlight=False,
        )


def show_devices(console: Console, plan: "DevicePlan") -> None:
    """Show the first split of devices, and the memory that each kind of worker needs."""
    console.print(plan.sentence(), markup=False, highlight=False)
    if not plan.memory:
        console.print("the shape of the model is not known yet, so its memory is not estimated", highlight=False)
        return
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("memory of one", "part", "size", "arithmetic"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for memory in plan.memory:
        for number, part in enumerate(memory.parts):
            table.add_row("" if number else memory.who, part.name, _size(part.nbytes), part.formula)
        there = "unknown" if memory.limit is None else _size(memory.limit)
        verdict = Text.assemble(f"of {there} ", "" if memory.fits else ("does not fit", "bold red"))
        table.add_row("", "total", _size(memory.nbytes), verdict, end_section=True)
    console.print(table)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:,.2f} MB"


def show_placement(console: Console, planned: Sequence[Planned], there: str) -> None:
    """Show where workers would run on a cluster."""
    console.print(f"the cluster has {there}; workers would be placed, for example, as follows:", highlight=False)
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("worker", "needs", "node", "why"):
        table.add_column(column)
    for each in planned:
        table.add_row(each.name, str(each.needs), "waits" if each.node is None else each.node.name, each.why)
    console.print(table)


def show_health(console: Console, healths: Sequence[NodeHealth], problems: Sequence[str], notes: Sequence[str]) -> None:
    """Show what every node of a cluster has, and below it what is wrong."""
    ours = own_versions()
    controller = {"Python": ours.python, **ours.packages}
    console.print("the controller has " + ", ".join(f"{name} {version or '–'}" for name, version in controller.items()))
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("node", "versions", "GPUs", "memory", "disk", "/dev/shm", "link", "clock"):
        table.add_column(column, no_wrap=column == "node")
    for health in healths:
        table.add_row(health.node.name, *_health_cells(health, controller))
    console.print(table)
    for mark, color, lines in (("bad", "red", problems), ("note", "yellow", notes)):
        for line in lines:
            console.print(f"[{color}]{mark}[/]  {escape(line)}", soft_wrap=True)
    if not problems:
        console.print(f"all {len(healths)} nodes can take part in a run")


def _health_cells(health: NodeHealth, controller: Mapping[str, str]) -> list[str]:
    answer = health.answer
    if "problem" in answer:
        return ["no answer"]
    there, link = {"Python": answer["python"], **answer["packages"]}, answer["link"]
    others = [f"{name} {there[name] or '–'}" for name, version in controller.items() if there[name] != version]
    sizes = (answer[key] for key in ("memory_bytes", "disk_bytes", "shared_bytes"))
    linked = (
        ("none", "") if "problem" in link else (f"{link['trip_s'] * 1000:.2f} ms", f"{link['offset_s'] * 1000:+.1f} ms")
    )
    return [
        ", ".join(others) or "same",
        f"{answer['gpus']} of {health.node.total.get('GPU', 0):g}",
        *("?" if size is None else f"{size / 1e9:.0f} GB" for size in sizes),
        *linked,
    ]


def _alike(workers: Sequence[WorkerSpec]) -> dict[tuple[str, str, str, str], list[str]]:
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for worker in workers:
        key = (worker.role.value, worker.pool, worker.hardware, worker.factory)
        alike.setdefault(key, []).append(worker.name)
    return alike


def show_waste(console: Console, report: Report) -> None:
    """Show the outcomes of the trajectories and tokens of a run."""
    console.print(_counts(report))


def show_comparison(console: Console, reports: Sequence[Report]) -> None:
    """Show one scenario in several modes: what each costs, and why the next one is faster."""
    first = reports[0]
    console.print(
        f"[bold]{escape(first.name)}[/] · α = {first.alpha} · seed {first.seed} · {first.steps} steps; "
        "only the mode differs"
    )
    table = _table("per step", *(report.mode for report in reports))
    table.add_row("step time", *(_seconds(report.step_s) for report in reports))
    table.add_row("trajectories/s", *(f"{report.trajectories_per_s:.2f}" for report in reports))
    table.add_row(f"speed over {first.mode}", *(f"{first.step_s / report.step_s:.2f}×" for report in reports))
    table.add_row("staleness mean / max", *(_mean_max(report.staleness) for report in reports))
    table.add_row("lag mean / max", *(_mean_max(report.lag) for report in reports))
    table.add_row("tokens wasted", *(f"{report.wasted_token_share:.1%}" for report in reports))
    table.add_row("KV tokens recomputed", *(f"{report.recomputed_tokens / report.steps:,.0f}" for report in reports))
    for task, classes in reports[-1].placements.items():
        best = max(classes, key=lambda name: classes[name])
        shares = [report.placements[task].get(best, 0) / sum(report.placements[task].values()) for report in reports]
        table.add_row(f"{task} on {best}", *(f"{share:.0%}" for share in shares))
    table.add_section()
    times = [report.engine_seconds_per_step() for report in reports]
    for cause in causes_of(times):
        name = "engines busy" if cause is TimeUse.BUSY else f"  idle: {words(cause)}"
        table.add_row(name, *(_seconds(time.get(cause, 0.0)) for time in times))
    console.print(table)
    console.print("What makes the difference, in seconds of the average engine per step:")
    for (before, after), (old, new) in zip(pairwise(reports), pairwise(times), strict=True):
        console.print(f"  {before.mode} → {after.mode}: {before.step_s / after.step_s:.2f}×  ({_gap(old, new)})")


def _gap(old: Mapping[TimeUse, float], new: Mapping[TimeUse, float]) -> str:
    """The causes whose time changed most, largest first."""
    change = {cause: new.get(cause, 0.0) - old.get(cause, 0.0) for cause in causes_of([old, new])}
    largest = max((abs(seconds) for seconds in change.values()), default=0.0)
    causes = sorted((c for c in change if abs(change[c]) >= 0.05 * largest > 0), key=lambda c: change[c])
    return ", ".join(f"{words(cause)} {change[cause]:+.2f} s" for cause in causes) or "no difference"


def _figures(report: Report) -> Table:
    table = _table("step", "first", "trajectories/s", "tokens/s", "sync suspends", "sync waits")
    table.add_row(
        _seconds(report.step_s),
        _seconds(report.first_step_s),
        f"{report.trajectories_per_s:.2f}",
        f"{report.tokens_per_s:,.0f}",
        _seconds(report.suspended_s),
        _seconds(report.exposed_s),
    )
    return table


def _pools(report: Report) -> Table:
    """Where every pool's time went, as percentages of its worker-seconds."""
    table = _table("pool", "busy", "idle, by cause")
    table.columns[2].justify = "left"
    for pool, seconds in report.pools.items():
        total = sum(seconds.values()) or 1.0
        idle = sorted((cause for cause in seconds if cause is not TimeUse.BUSY), key=lambda cause: -seconds[cause])
        shares = [f"{words(cause)} {seconds[cause] / total:.1%}" for cause in idle if seconds[cause] / total >= 0.0005]
        engines = report.engines.get(pool)
        name = f"{pool} ({engines} engine{'s' if engines > 1 else ''})" if engines else pool
        table.add_row(name, f"{seconds.get(TimeUse.BUSY, 0.0) / total:.1%}", ", ".join(shares))
    return table


def _steady(steady: Steady) -> Table:
    """Engine utilisation while groups were opened, after the first step."""
    table = _table("without start and end", "busy", "in steps", "for KV recompute", "suspended by syncs")
    for pool, stepping in steady.stepping.items():
        shares = (steady.busy[pool], stepping, steady.recompute[pool], steady.suspended)
        table.add_row(pool, *(f"{share:.1%}" for share in shares))
    return table


def _counts(report: Report) -> Table:
    table = PlainTable(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_row("staleness of claimed groups", _histogram(report.staleness))
    table.add_row("training lag", _histogram(report.lag))
    table.add_row("trajectories", _list(report.outcomes))
    table.add_row("groups", _list(report.group_outcomes))
    if report.filtered:
        table.add_row("groups filtered", "; ".join(f"{cause} ({count:,})" for cause, count in report.filtered.items()))
    table.add_row(
        "tokens",
        f"{report.sampled_tokens:,} sampled, {report.trained_tokens:,} trained, "
        f"{report.prefilled_tokens:,} prefilled, {report.recomputed_tokens:,} recomputed after updates",
    )
    wasted = ", ".join(f"{words(cause)} {tokens:,}" for cause, tokens in report.wasted_tokens.items()) or "none"
    table.add_row("tokens wasted", f"{report.wasted_token_share:.1%}: {wasted}")
    for task, compared in report.bias.items():
        table.add_row(f"{task} trained against offered, per prompt", _bias(compared))
        table.add_row(f"{task} per member", _bias(report.member_bias[task]))
    for warning in warnings(report.bias):
        table.add_row(Text("bias", style="bold"), warning)
    for task, redundancy in report.redundancy.items():
        table.add_row(f"{task} extra members", _redundancy(redundancy))
    if report.prompts_lost:
        table.add_row(
            "lost to the staleness bound",
            f"{report.prompts_lost:,} times; {report.own_bounds:,} groups got bounds of their own",
        )
    if report.members_replaced:
        table.add_row("late members replaced", f"{report.members_replaced:,}")
    for task, turns in report.placements.items():
        total = sum(turns.values())
        table.add_row(f"{task} turns on", ", ".join(f"{name} {count / total:.0%}" for name, count in turns.items()))
    for number, sentence in enumerate(report.affinity.values()):
        table.add_row("" if number else "hardware by measurement", sentence)
    if report.moves:
        table.add_row("moves between classes", f"{report.moves:,}")
    for number, sentence in enumerate(report.elasticity.values()):
        table.add_row("" if number else "engines by need", sentence)
    if report.resizes > len(report.elasticity):
        table.add_row("changes of pools", f"{report.resizes:,}")
    if report.fallbacks:
        table.add_row("placed elsewhere", _list(report.fallbacks))
    rewards = [
        f"{task} {value:.3f}" + (f" (kept {report.kept_reward[task]:.3f})" if task in report.kept_reward else "")
        for task, value in report.reward.items()
    ]
    table.add_row("mean reward", ", ".join(rewards) or "none")
    if report.reward_parts:
        table.add_row("by name", ", ".join(f"{name} {value:.3f}" for name, value in report.reward_parts.items()))
    if report.rewards_defaulted:
        table.add_row("rewards that failed and have their default", _list(report.rewards_defaulted))
    rare = {"shares redistributed": report.redistributed, "workers lost": report.workers_lost, "stalls": report.stalls}
    for label, count in rare.items():
        if count:
            table.add_row(label, str(count))
    return table


Columns = Mapping[str, Callable[[RewardUse], str]]
CALLS: Columns = {
    "calls": lambda use: f"{use.calls:,}",
    "failed": lambda use: f"{use.failed:,}" if use.failed else "",
    "median": lambda use: _seconds(use.latency_s(0.5)),
    "95 %": lambda use: _seconds(use.latency_s(0.95)),
    "99 %": lambda use: _seconds(use.latency_s(0.99)),
    "killed": lambda use: f"{use.kills:,}" if use.kills else "",
}
SERVICE: Columns = {
    "retries": lambda use: f"{use.retries:,}" if use.retries else "",
    "hedges": lambda use: f"{use.hedges:,}" if use.hedges else "",
    "local": lambda use: f"{use.fallbacks:,}" if use.fallbacks else "",
    "cold starts": lambda use: f"{use.cold_starts:,}" if use.cold_starts else "",
    "MB sent": lambda use: f"{use.bytes_out / 1e6:,.3g}" if use.bytes_out else "",
    "replica time": lambda use: _seconds(use.replica_s) if use.replica_s else "",
    "cost": lambda use: f"{use.cost:,.4g}" if use.cost else "",
}


def _functions(functions: Mapping[str, RewardUse]) -> Iterator[Table]:
    """Use of reward functions, in two tables that fit a narrow terminal. Without columns and rows that are empty."""
    for columns in (CALLS, SERVICE):
        cells = {title: [shown(use) for use in functions.values()] for title, shown in columns.items()}
        cells = {title: column for title, column in cells.items() if any(column)}
        if not cells:
            continue
        table = _table("reward function", *cells)
        table.columns[0].no_wrap = True  # the others give way: every row has its name
        for name, row in zip(functions, zip(*cells.values(), strict=True), strict=True):
            if any(row):
                table.add_row(name, *row)
        yield table


def _learned(report: Report, baselines: Baselines) -> Table:
    """First and last evaluation of every task, beside the scores of scripts."""
    table = _table("held-out reward", "before", "after", "episodes", "scripts on the same prompts")
    table.columns[4].justify = "left"
    rounds: dict[str, list[EvalEnded]] = {}
    for evaluation in report.evaluations:
        rounds.setdefault(evaluation.task, []).append(evaluation)
    for task, evaluations in rounds.items():
        first, last = evaluations[0], evaluations[-1]
        scripts = ", ".join(f"{name} {score:.2f}" for name, score in baselines.get(task, {}).items())
        table.add_row(task, _score(first), _score(last), f"{last.scored} of {last.episodes}", scripts)
    return table


def _score(evaluation: EvalEnded) -> str:
    mean = "no score" if evaluation.mean_reward is None else f"{evaluation.mean_reward:.3f}"
    passed = "".join(f", pass@{k} {value:.3f}" for k, value in evaluation.pass_at.items())
    return f"{mean}{passed} (step {evaluation.step})"


def _table(*columns: str) -> Table:
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def causes_of(times: Sequence[Mapping[TimeUse, float]]) -> list[TimeUse]:
    """Every cause that took any time, `busy` first."""
    found = {cause: None for time in times for cause, seconds in time.items() if seconds > 1e-9}
    return sorted(found, key=lambda cause: (cause is not TimeUse.BUSY, cause))


def words(cause: str) -> str:
    return cause.replace("_", " ")


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if 0 < value < 0.1 else f"{value:,.2f} s"


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{words(name)} {count:,}" for name, count in counts.items()) or "none"


def _bias(quantities: Mapping[str, Compared]) -> str:
    return ", ".join(
        f"{quantity} {compared.trained:.3g} against {compared.offered:.3g} (distance {compared.distance:.2f})"
        for quantity, compared in quantities.items()
    )


def _redundancy(redundancy: Redundancy) -> str:
    return (
        f"{redundancy.started:,} started (now {redundancy.extra} per group), {redundancy.trained:,} trained, "
        f"{redundancy.redundant_tokens:,} tokens of stopped members; groups were ready {redundancy.saved_s:.1f} s "
        "earlier, in sum"
    )


def _histogram(counts: Mapping[int, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{value}: {count / total:.0%}" for value, count in counts.items()) or "none"


def _mean_max(counts: Mapping[int, int]) -> str:
    total = sum(counts.values())
    if not total:
        return "–"
    return f"{sum(value * count for value, count in counts.items()) / total:.2f} / {max(counts)}"
