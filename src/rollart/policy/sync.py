"""The six-step weight sync as a state machine: which engine stages, commits and serves what.

    published ─► Stage to every engine, while rollout goes on
    (1) the batch is claimed          (2) `begin`: Suspend            (3) Update, where the version is staged
    (4) Resume                        (5) the engine recomputes KV    (6) training starts

A version is committed only on engines that staged and verified it. All engines in service have the same version, except
during a rolling update. An engine that joins gets the version in service before its first request, and never a newer
one; an engine that cannot load a version leaves service and the others continue without it. A sync is about one
version: a version published meanwhile is staged after it.
"""

from dataclasses import dataclass

from rollart.types.errors import InvariantBroken
from rollart.types.ids import WorkerId
from rollart.types.messages import EngineCommand, Resume, Stage, Suspend, Update
from rollart.types.versions import Version
from rollart.types.weights import Manifest

Commands = list[tuple[WorkerId, list[EngineCommand]]]

STAGE_ATTEMPTS = 3


@dataclass(slots=True)
class EngineWeights:
    """State of one engine, and the commands that it has not answered yet."""

    serving: Version | None = None
    staged: Version | None = None
    staging: Version | None = None
    updating: Version | None = None
    failures: int = 0
    suspended: bool = False


class SyncBook:
    """Weights of all engines. `served` is the version of the run, which every engine in service has."""

    def __init__(self, *, rolling: bool) -> None:
        self._rolling = rolling
        self._engines: dict[WorkerId, EngineWeights] = {}
        self._manifests: dict[Version, Manifest] = {}
        self.served: Version | None = None
        self._target: Version | None = None
        self._newest: Version | None = None
        self._newest_in_service: Version | None = None

    def version(self) -> Version:
        """The version of the run; during a rolling update, the newest that an engine serves."""
        if self.served is None:
            raise InvariantBroken("asked for the version in service before there was one")
        newest = self._newest_in_service
        return self.served if newest is None or newest <= self.served else newest

    @property
    def newest(self) -> Version | None:
        """The newest published version."""
        return self._newest

    @property
    def syncing(self) -> bool:
        return self._target is not None

    def in_service(self, engine: WorkerId) -> bool:
        """Whether the engine may get requests: it serves the version of the run or, during a sync, one of the two."""
        weights = self._engines.get(engine)
        return weights is not None and weights.serving is not None

    def engines_in_service(self) -> list[WorkerId]:
        return [engine for engine in self._engines if self.in_service(engine)]

    def waits_for(self) -> list[WorkerId]:
        """Engines in service that have yet to stage the newest version, or to commit it during a sync."""
        if self.syncing:
            return [engine for engine, weights in self._engines.items() if weights.serving and weights.updating]
        return [
            engine for engine, weights in self._engines.items() if weights.serving and self._newest != weights.staged
        ]

    def ready(self) -> bool:
        """Whether every engine in service has staged the newest version."""
        return not self.syncing and self._newest is not None and not self.waits_for()

    def engine_joined(self, engine: WorkerId) -> Commands:
        """Add an engine: it stages the version that the run serves (or is about to) before it enters service."""
        weights = self._engines[engine] = EngineWeights()
        return self._stage_first(engine, weights)

    def engine_left(self, engine: WorkerId) -> Commands:
        """Remove an engine that is gone or out of service; a sync continues without it."""
        self._engines.pop(engine, None)
        return self._continue()

    def published(self, manifest: Manifest) -> Commands:
        """A version is in the store: stage it on every engine, after the sync in progress if there is one."""
        if self._newest is not None and manifest.version <= self._newest:
            raise InvariantBroken(f"{manifest.version} was published after {self._newest}: versions only grow")
        self._manifests[manifest.version] = manifest
        self._newest = manifest.version
        keep = {self.served, self._target, self._newest}
        self._manifests = {version: kept for version, kept in self._manifests.items() if version in keep}
        commands: Commands = []
        for engine, weights in self._engines.items():
            # An engine still loading its first version finishes that; the newest follows.
            if weights.serving is None and weights.staging is None and weights.updating is None:
                commands += self._stage_first(engine, weights)
        return commands + self._stage_newest()

    def staged(self, engine: WorkerId, version: Version) -> Commands:
        """The engine holds the version and has verified it."""
        weights = self._engines.get(engine)
        if weights is None or weights.staging != version:
            return []
        weights.staged, weights.staging, weights.failures = version, None, 0
        if weights.serving is None:
            return self._enter_service(engine, weights)
        return []

    def stage_failed(self, engine: WorkerId, version: Version) -> Commands | None:
        """The engine could not load the version: retry, or None if it must leave service."""
        weights = self._engines.get(engine)
        if weights is None or version not in (weights.staging, weights.updating):
            return []
        weights.failures += 1
        if weights.failures >= STAGE_ATTEMPTS or version == weights.updating:
            return None
        if weights.serving is None:
            return self._stage_first(engine, weights)
        return [(engine, [self._stage(weights, version)])]

    def begin(self) -> Commands:
        """Steps 2 and 3, once `ready`: suspend and update. `updated` and `engine_left` continue."""
        if not self.ready():
            raise InvariantBroken(f"sync to {self._newest} began while {self.waits_for()} have not staged it")
        self._target = self._newest
        if self._rolling:
            return self._continue()
        commands: Commands = []
        for engine, weights in self._engines.items():
            if weights.serving is not None:
                commands.append((engine, self._update(weights)))
        return commands or self._continue()

    def updated(self, engine: WorkerId, version: Version) -> Commands:
        """The engine serves the version."""
        weights = self._engines.get(engine)
        if weights is None or version != weights.updating:
            return []
        weights.updating = None
        if version != self._current():
            # A new engine, and the run advanced between Update and its answer: it catches up before it serves.
            return self._stage_first(engine, weights)
        weights.serving = version
        self._newest_in_service = max(version, self._newest_in_service or version)
        if self._target is not None:
            return self._continue()
        self.served = version
        return self._stage_newest()

    def _continue(self) -> Commands:
        """During a sync: update the next engine of a rolling update, or finish once no engine is left."""
        if self._target is None:
            return []
        in_service = [(engine, weights) for engine, weights in self._engines.items() if weights.serving is not None]
        if any(weights.updating is not None for _, weights in in_service):
            return []
        commands: Commands = []
        for engine, weights in in_service:
            if weights.suspended:
                weights.suspended = False
                commands.append((engine, [Resume()]))
            if weights.serving != self._target:
                commands.append((engine, self._update(weights)))
                return commands
        self.served, self._target = self._target, None
        return commands + self._stage_newest()

    def _update(self, weights: EngineWeights) -> list[EngineCommand]:
        if self._target is None or weights.staged != self._target:
            raise InvariantBroken(f"update to {self._target} of an engine that has staged {weights.staged}")
        weights.updating = self._target
        weights.suspended = True
        return [Suspend(), Update(self._target)]

    def _enter_service(self, engine: WorkerId, weights: EngineWeights) -> Commands:
        """A new engine has staged its first version. If the run advanced meanwhile, it stages again."""
        if weights.staged is None or weights.staged != self._current():
            return self._stage_first(engine, weights)
        weights.updating = weights.staged
        return [(engine, [Update(weights.staged)])]

    def _current(self) -> Version | None:
        """The version that a new engine must serve: that of the run, or the one about to be."""
        return self._target or self.served or self._newest

    def _stage_first(self, engine: WorkerId, weights: EngineWeights) -> Commands:
        """Stage the version that a new engine must serve."""
        version = self._current()
        return [] if version is None else [(engine, [self._stage(weights, version)])]

    def _stage_newest(self) -> Commands:
        """Outside a sync, stage the newest version on engines in service, once each."""
        if self._target is not None or self._newest is None:
            return []
        return [
            (engine, [self._stage(weights, self._newest)])
            for engine, weights in self._engines.items()
            if weights.serving is not None and self._newest not in (weights.staged, weights.staging)
        ]

    def _stage(self, weights: EngineWeights, version: Version) -> Stage:
        weights.staging = version
        return Stage(self._manifests[version])
