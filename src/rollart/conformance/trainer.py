"""Conformance of trainers: workers that handle `Train`, `Publish` and `Save`."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.conformance.drive import WorkerDrive
from rollart.ports.weights import WeightStore
from rollart.ports.worker import Worker
from rollart.types.errors import WeightError
from rollart.types.ids import ClaimId
from rollart.types.messages import (
    Publish,
    Published,
    Save,
    Saved,
    SaveFailed,
    Train,
    Trained,
    TrainerFailed,
    TrainerInfo,
    WorkerEvent,
)
from rollart.types.trajectory import TrainSample
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket

SUITE = Suite["TrainerHarness", None]()


@dataclass(kw_only=True)
class TrainerHarness:
    """A fresh trainer, the store it publishes to, and batches for it."""

    build: Callable[[Callable[[], None]], Worker]
    """The next trainer of the run; the first starts fresh, later ones find the checkpoints of earlier ones."""
    store: WeightStore
    batch: Callable[[int], tuple[TrainSample, ...]]
    """The i-th batch; one that changes the weights."""
    virtual: bool
    bad_batch: tuple[TrainSample, ...] | None = None
    """A batch that cannot be trained."""
    saves: bool = True
    """Whether its trainers can save checkpoints."""
    interrupt_save: Callable[[], None] | None = None
    """Make a trainer die in the middle of its next `Save`: a call of it raises, and nothing is cleaned up."""


@SUITE.case
def joins_with_trainer_info(harness: TrainerHarness) -> None:
    """A trainer joins with `TrainerInfo`."""
    with drive(harness) as worker:
        check(isinstance(worker.info, TrainerInfo), f"a trainer joins with TrainerInfo, not with {worker.info}")


@SUITE.case
def initial_weights_can_be_published(harness: TrainerHarness) -> None:
    """Before any training the weights can be published under the requested version, complete and verified."""
    with drive(harness) as worker:
        manifest = publish(worker, Version(0, 0))
        whole(harness.store, manifest)
        check(manifest.parent is None, f"the first version has no parent, but has {manifest.parent}")


@SUITE.case
def a_step_echoes_its_claim(harness: TrainerHarness) -> None:
    """`Trained` carries the requested claim and version, with finite metrics."""
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        for step in (1, 2):
            done = train(worker, harness, step)
            check(done.version == Version(0, step), f"the weights become v0.{step}, but `Trained` has {done.version}")
            broken = {name: number for name, number in done.metrics.items() if not math.isfinite(number)}
            check(not broken, f"metrics are finite, but got {broken}")


@SUITE.case
def a_trained_version_is_published(harness: TrainerHarness) -> None:
    """After a step the new version is in the store, complete, with the previous one as its parent."""
    with drive(harness) as worker:
        first = publish(worker, Version(0, 0))
        train(worker, harness, 1)
        second = publish(worker, Version(0, 1))
        whole(harness.store, second)
        check(
            second.parent == first.version,
            f"{second.version} follows {first.version}, but its parent is {second.parent}",
        )
        check(second.digests != first.digests, "one optimiser step changes the weights, but their digests are equal")


@SUITE.case
def training_does_not_publish(harness: TrainerHarness) -> None:
    """Only `Publish` writes to the store."""
    with drive(harness) as worker:
        first = publish(worker, Version(0, 0))
        train(worker, harness, 1)
        worker.settle()
        check(
            harness.store.newest() == first.version, f"only `Publish` publishes, but {harness.store.newest()} is there"
        )


@SUITE.case
def commands_keep_their_order(harness: TrainerHarness) -> None:
    """Commands that arrive together are executed one after the other, in order."""
    with drive(harness) as worker:
        worker.send(
            Publish(Version(0, 0)),
            Train(ClaimId(1), Version(0, 1), harness.batch(1)),
            Publish(Version(0, 1)),
            Train(ClaimId(2), Version(0, 2), harness.batch(2)),
        )
        worker.until(lambda event: isinstance(event, Trained | TrainerFailed) and event.claim == ClaimId(2))
        worker.settle()
        done = [describe(event) for event in worker.events]
        expected = ["published v0.0", "trained 1", "published v0.1", "trained 2"]
        check(done == expected, f"commands are executed in order, {expected}, but gave {done}")


@SUITE.case
def an_old_version_is_not_published(harness: TrainerHarness) -> None:
    """Versions only grow: publishing an older one is `TrainerFailed`, and the store is unchanged."""
    with drive(harness) as worker:
        publish(worker, Version(1, 5))
        for version in (Version(1, 4), Version(0, 9)):
            place = worker.mark()
            worker.send(Publish(version))
            answer = worker.until(lambda event: isinstance(event, Published | TrainerFailed), after=place)
            check(isinstance(answer, TrainerFailed), f"{version} is older than v1.5 and fails, but gave {answer}")
            check(harness.store.newest() == Version(1, 5), f"the store is unchanged, but has {harness.store.newest()}")
        train(worker, harness, 6, epoch=1)
        whole(harness.store, publish(worker, Version(1, 6)))


@SUITE.case
def a_duplicate_train_is_trained_once(harness: TrainerHarness) -> None:
    """A claim that arrives twice is trained once; its answers, one or two, are equal."""
    digests = []
    for times in (1, 2):
        with drive(harness) as worker:
            publish(worker, Version(times, 0))
            claim = Train(ClaimId(1), Version(times, 1), harness.batch(1))
            worker.send(*[claim] * times)
            worker.until(Trained)
            worker.send(*[claim] * (times - 1))
            worker.settle()
            answers = [event for event in worker.events if isinstance(event, Trained | TrainerFailed)]
            check(all(answer == answers[0] for answer in answers), f"a claim has one answer, but got {answers}")
            digests.append(publish(worker, Version(times, 1)).digests)
    check(digests[0] == digests[1], "a duplicate claim is trained once, but the weights are not those of one step")


@SUITE.case
def a_duplicate_publish_is_not_a_failure(harness: TrainerHarness) -> None:
    """A repeated `Publish` is neither a second publication nor a failure."""
    with drive(harness) as worker:
        worker.send(Publish(Version(0, 0)), Publish(Version(0, 0)))
        worker.until(Published)
        worker.settle()
        failed = [event for event in worker.events if isinstance(event, TrainerFailed)]
        check(not failed, f"a command may arrive twice, but the second one failed: {failed}")
        manifests = {event.manifest.digests for event in worker.events if isinstance(event, Published)}
        check(len(manifests) == 1, "a version has one manifest")


@SUITE.case
def a_bad_batch_fails_its_claim(harness: TrainerHarness) -> None:
    """A batch that cannot be trained is `TrainerFailed` with its claim; the weights are unchanged."""
    if harness.bad_batch is None:
        raise NotApplicable("the harness has no batch that cannot be trained")
    with drive(harness) as worker:
        first = publish(worker, Version(0, 0))
        worker.send(Train(ClaimId(1), Version(0, 1), harness.bad_batch))
        answer = worker.until(lambda event: isinstance(event, Trained | TrainerFailed))
        check(
            isinstance(answer, TrainerFailed) and answer.claim == ClaimId(1) and bool(answer.reason),
            f"the claim fails with a reason, but the answer was {answer}",
        )
        second = publish(worker, Version(0, 1))
        check(second.digests == first.digests, "after a failure the weights are unchanged")


@SUITE.case
def a_fresh_trainer_restores_nothing(harness: TrainerHarness) -> None:
    """Only `Save` makes a checkpoint: after training and publishing alone, the next trainer starts fresh."""
    with drive(harness) as worker:
        check(restored(worker) is None, f"there is no checkpoint yet, but {restored(worker)} was restored")
        publish(worker, Version(0, 0))
        train(worker, harness, 1)
        publish(worker, Version(0, 1))
    with drive(harness) as worker:
        check(restored(worker) is None, f"nothing was saved, but {restored(worker)} was restored")


@SUITE.case
def a_saved_version_is_restored(harness: TrainerHarness) -> None:
    """`Saved` carries the version; the next trainer starts from it, and publishes the same weights in a new epoch."""
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        train(worker, harness, 1)
        before = publish(worker, Version(0, 1))
        save(worker, harness, Version(0, 1))
    with drive(harness) as worker:
        comes_back(worker, Version(0, 1))
        after = publish(worker, Version(1, 1))
        whole(harness.store, after)
        check(after.digests == before.digests, "the weights of a checkpoint are those that were saved, but they differ")
        train(worker, harness, 2, epoch=1)
        save(worker, harness, Version(1, 2))
    with drive(harness) as worker:
        comes_back(worker, Version(1, 2))


@SUITE.case
def the_newest_save_is_restored(harness: TrainerHarness) -> None:
    """The newest of several checkpoints is restored, with its weights; later training is lost."""
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        for step in (1, 2):
            train(worker, harness, step)
            save(worker, harness, Version(0, step))
        saved = publish(worker, Version(0, 2))
        train(worker, harness, 3)
    with drive(harness) as worker:
        comes_back(worker, Version(0, 2))
        after = publish(worker, Version(1, 2))
        check(after.digests == saved.digests, "the weights of v0.2 were saved, but different ones were restored")


@SUITE.case
def training_resumes_exactly(harness: TrainerHarness) -> None:
    """A step has the same result after a restore: the optimiser was saved along with the weights."""
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        train(worker, harness, 1)
        save(worker, harness, Version(0, 1))
        train(worker, harness, 2)
        without = publish(worker, Version(0, 2))
    with drive(harness) as worker:
        comes_back(worker, Version(0, 1))
        train(worker, harness, 2, epoch=1)
        check(
            publish(worker, Version(1, 2)).digests == without.digests,
            "a step after a restore equals the step without one, but the weights differ",
        )


@SUITE.case
def only_the_current_version_is_saved(harness: TrainerHarness) -> None:
    """`Save` of a version other than the current one is `SaveFailed` with a reason, and makes no checkpoint."""
    needs_checkpoints(harness)
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        train(worker, harness, 1)
        for version in (Version(0, 2), Version(0, 0), Version(1, 1)):
            answer = ask_to_save(worker, version)
            check(
                isinstance(answer, SaveFailed) and answer.version == version and bool(answer.reason),
                f"the weights are those of v0.1, so {version} cannot be saved, but the answer was {answer}",
            )
    with drive(harness) as worker:
        check(restored(worker) is None, f"no save was carried out, but {restored(worker)} was restored")


@SUITE.case
def a_duplicate_save_gets_the_same_answer(harness: TrainerHarness) -> None:
    """A repeated `Save`, at once or after the next step, is not a failure and changes nothing."""
    needs_checkpoints(harness)
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        train(worker, harness, 1)
        before = publish(worker, Version(0, 1))
        worker.send(Save(Version(0, 1)), Save(Version(0, 1)))
        worker.until(Saved)
        worker.send(Save(Version(0, 1)))
        worker.settle()
        train(worker, harness, 2)
        worker.send(Save(Version(0, 1)))
        worker.settle()
        answers = [event for event in worker.events if isinstance(event, Saved | SaveFailed)]
        check(all(answer == Saved(Version(0, 1)) for answer in answers), f"a version is saved once, but gave {answers}")
    with drive(harness) as worker:
        comes_back(worker, Version(0, 1))
        after = publish(worker, Version(1, 1))
        check(
            after.digests == before.digests, "a duplicate `Save` changes nothing, but the checkpoint's weights differ"
        )


@SUITE.case
def saving_changes_nothing_else(harness: TrainerHarness) -> None:
    """`Save` keeps its place among the commands, publishes nothing and leaves the weights unchanged."""
    needs_checkpoints(harness)
    with drive(harness) as worker:
        before = publish(worker, Version(0, 0))
        worker.send(
            Save(Version(0, 0)),
            Train(ClaimId(1), Version(0, 1), harness.batch(1)),
            Save(Version(0, 1)),
            Train(ClaimId(2), Version(0, 2), harness.batch(2)),
        )
        worker.until(lambda event: isinstance(event, Trained | TrainerFailed) and event.claim == ClaimId(2))
        worker.settle()
        done = [describe(event) for event in worker.events]
        expected = ["published v0.0", "saved v0.0", "trained 1", "saved v0.1", "trained 2"]
        check(done == expected, f"commands are executed in order, {expected}, but gave {done}")
        check(harness.store.newest() == before.version, "only `Publish` publishes, but `Save` did too")


@SUITE.case
def an_interrupted_save_keeps_the_previous_checkpoint(harness: TrainerHarness) -> None:
    """If a trainer dies during a `Save`, before `Saved`, the next one starts from the previous checkpoint."""
    needs_checkpoints(harness)
    if harness.interrupt_save is None:
        raise NotApplicable("the harness cannot interrupt a save")
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        train(worker, harness, 1)
        before = publish(worker, Version(0, 1))
        save(worker, harness, Version(0, 1))
        train(worker, harness, 2)
        harness.interrupt_save()
        # A `Saved` that came before the death must hold.
        step = 2 if answers_saved(worker, Version(0, 2)) else 1
    with drive(harness) as worker:
        comes_back(worker, Version(0, step))
        after = publish(worker, Version(1, step))
        if step == 1:
            check(after.digests == before.digests, "the previous checkpoint is intact, but its weights differ")
        train(worker, harness, step + 1, epoch=1)
        save(worker, harness, Version(1, step + 1))
    with drive(harness) as worker:
        comes_back(worker, Version(1, step + 1))


def drive(harness: TrainerHarness) -> WorkerDrive:
    return WorkerDrive(harness.build, virtual=harness.virtual)


def publish(worker: WorkerDrive, version: Version) -> Manifest:
    """Publish a version that is valid."""
    place = worker.mark()
    worker.send(Publish(version))
    answer = worker.until(lambda event: isinstance(event, Published | TrainerFailed), after=place)
    if not isinstance(answer, Published):
        raise ConformanceError(f"{version} is newer than all before it, but publishing it gave {answer}")
    check(answer.manifest.version == version, f"{version} was requested, but {answer.manifest.version} was published")
    return answer.manifest


def train(worker: WorkerDrive, harness: TrainerHarness, step: int, *, epoch: int = 0) -> Trained:
    """One step on a valid batch."""
    claim = ClaimId(100 + step)
    worker.send(Train(claim, Version(epoch, step), harness.batch(step)))
    answer = worker.until(lambda event: isinstance(event, Trained | TrainerFailed) and event.claim == claim)
    if not isinstance(answer, Trained):
        raise ConformanceError(f"a valid batch is trained, but the answer was {answer}")
    return answer


def needs_checkpoints(harness: TrainerHarness) -> None:
    if not harness.saves:
        raise NotApplicable("the trainers of this harness cannot save checkpoints")


def restored(worker: WorkerDrive) -> Version | None:
    return worker.info.restored if isinstance(worker.info, TrainerInfo) else None


def comes_back(worker: WorkerDrive, version: Version) -> None:
    check(
        restored(worker) == version, f"{version} was the last `Saved`, but the next trainer restored {restored(worker)}"
    )


def ask_to_save(worker: WorkerDrive, version: Version) -> WorkerEvent:
    place = worker.mark()
    worker.send(Save(version))
    return worker.until(lambda event: isinstance(event, Saved | SaveFailed), after=place)


def save(worker: WorkerDrive, harness: TrainerHarness, version: Version) -> None:
    """Save the current version."""
    needs_checkpoints(harness)
    answer = ask_to_save(worker, version)
    check(answer == Saved(version), f"the weights are those of {version} and can be saved, but the answer was {answer}")


def answers_saved(worker: WorkerDrive, version: Version) -> bool:
    """Whether a trainer that dies during a `Save` answered `Saved` before."""
    place = worker.mark()
    worker.send(Save(version))
    with suppress(ConformanceError):  # the drive raises it when the worker is dead
        worker.settle()
    return Saved(version) in worker.events[place:]


def whole(store: WeightStore, manifest: Manifest) -> None:
    """The version of a `Published` is in the store, every bucket verified, every tensor inside its bucket."""
    check(store.newest() == manifest.version, f"{manifest.version} is the newest in the store, not {store.newest()}")
    held = store.manifest(manifest.version)
    check(held == manifest, "the manifest in the store is the published one")
    for index in range(len(manifest.digests)):
        try:
            verify_bucket(manifest, index, store.bucket(manifest.version, index))
        except WeightError as error:
            raise ConformanceError(f"a published version can be read completely, but {error}") from error
    for tensor in manifest.tensors:
        end = tensor.offset + tensor.nbytes
        check(end <= manifest.bucket_bytes[tensor.bucket], f"{tensor.name} extends beyond its bucket")


def describe(event: WorkerEvent) -> str:
    if isinstance(event, Published):
        return f"published {event.manifest.version}"
    if isinstance(event, Trained):
        return f"trained {event.claim}"
    if isinstance(event, Saved):
        return f"saved {event.version}"
    return str(event)


CASES: tuple[Case[TrainerHarness, None], ...] = SUITE.cases()
