"""Conformance of trainers: workers that speak `Train`, `Publish` and `Save`."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rollart.ports.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.conformance.drive import WorkerDrive
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
    """The next trainer of the run; the first starts fresh, a later one finds what those before it saved."""
    store: WeightStore
    batch: Callable[[int], tuple[TrainSample, ...]]
    """The i-th batch; one that changes the weights."""
    virtual: bool
    bad_batch: tuple[TrainSample, ...] | None = None
    """A batch that cannot be trained."""
    saves: bool = True
    """Whether its trainers have a place for checkpoints."""
    cut_save: Callable[[], None] | None = None
    """From now on a trainer dies in the middle of its next `Save`: a call of it raises, and nothing is tidied up."""


@SUITE.case
def says_what_it_is(harness: TrainerHarness) -> None:
    """A trainer joins with `TrainerInfo`."""
    with drive(harness) as worker:
        check(isinstance(worker.info, TrainerInfo), f"a trainer joins with TrainerInfo, not with {worker.info}")


@SUITE.case
def initial_weights_can_be_published(harness: TrainerHarness) -> None:
    """Before any training the weights are published under the version asked for, whole and verified."""
    with drive(harness) as worker:
        manifest = publish(worker, Version(0, 0))
        whole(harness.store, manifest)
        check(manifest.parent is None, f"the first version has no parent, but names {manifest.parent}")


@SUITE.case
def a_step_echoes_its_claim(harness: TrainerHarness) -> None:
    """`Trained` names the claim and the version that were asked for, with finite metrics."""
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        for step in (1, 2):
            done = train(worker, harness, step)
            check(done.version == Version(0, step), f"the weights become v0.{step}, but `Trained` says {done.version}")
            broken = {name: number for name, number in done.metrics.items() if not math.isfinite(number)}
            check(not broken, f"metrics are finite, but {broken} came")


@SUITE.case
def a_trained_version_is_published(harness: TrainerHarness) -> None:
    """After a step the new version is in the store, whole, with the one before as its parent."""
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
    """Commands that arrive together are carried out one after the other, in order."""
    with drive(harness) as worker:
        worker.send(
            Publish(Version(0, 0)),
            Train(ClaimId(1), Version(0, 1), harness.batch(1)),
            Publish(Version(0, 1)),
            Train(ClaimId(2), Version(0, 2), harness.batch(2)),
        )
        worker.until(lambda event: isinstance(event, Trained | TrainerFailed) and event.claim == ClaimId(2))
        worker.settle()
        told = [describe(event) for event in worker.events]
        expected = ["published v0.0", "trained 1", "published v0.1", "trained 2"]
        check(told == expected, f"commands are carried out in order, {expected}, but gave {told}")


@SUITE.case
def an_old_version_is_not_published(harness: TrainerHarness) -> None:
    """Versions only grow: publishing an older one is `TrainerFailed`, and the store is as it was."""
    with drive(harness) as worker:
        publish(worker, Version(1, 5))
        for version in (Version(1, 4), Version(0, 9)):
            place = worker.mark()
            worker.send(Publish(version))
            answer = worker.until(lambda event: isinstance(event, Published | TrainerFailed), after=place)
            check(isinstance(answer, TrainerFailed), f"{version} is older than v1.5 and fails, but gave {answer}")
            check(harness.store.newest() == Version(1, 5), f"the store is as it was, but has {harness.store.newest()}")
        train(worker, harness, 6, epoch=1)
        whole(harness.store, publish(worker, Version(1, 6)))


@SUITE.case
def a_doubled_train_is_trained_once(harness: TrainerHarness) -> None:
    """A claim that arrives twice is trained once; its answers, one or two, are alike."""
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
    check(digests[0] == digests[1], "a doubled claim is trained once, but the weights are not those of one step")


@SUITE.case
def a_doubled_publish_is_no_failure(harness: TrainerHarness) -> None:
    """A `Publish` that arrives twice is not a second publication, and no failure."""
    with drive(harness) as worker:
        worker.send(Publish(Version(0, 0)), Publish(Version(0, 0)))
        worker.until(Published)
        worker.settle()
        told = [event for event in worker.events if isinstance(event, TrainerFailed)]
        check(not told, f"a command may arrive twice, but the second was a failure: {told}")
        manifests = {event.manifest.digests for event in worker.events if isinstance(event, Published)}
        check(len(manifests) == 1, "a version has one manifest")


@SUITE.case
def a_bad_batch_fails_its_claim(harness: TrainerHarness) -> None:
    """A batch that cannot be trained is `TrainerFailed` with its claim; the weights are those of before."""
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
        check(second.digests == first.digests, "after a failure the weights are those of before")


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
    """`Saved` names the version; the next trainer starts from it, and publishes the same weights in a new epoch."""
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
    """Of several checkpoints the newest is restored, with its weights; what was trained after it is gone."""
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
        check(after.digests == saved.digests, "the weights of v0.2 were saved, but others were restored under its name")


@SUITE.case
def training_goes_on_as_if_it_had_not_stopped(harness: TrainerHarness) -> None:
    """What a step makes of the weights is the same after a restore: the optimiser was saved with them."""
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
            "a step after a restore is the step that would have been, but the weights differ",
        )


@SUITE.case
def only_the_current_version_is_saved(harness: TrainerHarness) -> None:
    """`Save` of a version that the weights are not is `SaveFailed` with a reason, and makes no checkpoint."""
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
def a_doubled_save_is_answered_alike(harness: TrainerHarness) -> None:
    """A `Save` that arrives again, at once or after the next step, is no failure and changes nothing."""
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
        check(after.digests == before.digests, "a doubled `Save` changes nothing, but the checkpoint has other weights")


@SUITE.case
def saving_changes_nothing_else(harness: TrainerHarness) -> None:
    """`Save` keeps its place among the commands, publishes nothing and leaves the weights as they are."""
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
        told = [describe(event) for event in worker.events]
        expected = ["published v0.0", "saved v0.0", "trained 1", "saved v0.1", "trained 2"]
        check(told == expected, f"commands are carried out in order, {expected}, but gave {told}")
        check(harness.store.newest() == before.version, "only `Publish` publishes, but `Save` did too")


@SUITE.case
def a_cut_save_leaves_the_one_before(harness: TrainerHarness) -> None:
    """Until `Saved` the checkpoint before is the one: of a trainer that dies in a `Save`, the next starts from it."""
    needs_checkpoints(harness)
    if harness.cut_save is None:
        raise NotApplicable("the harness cannot cut a save")
    with drive(harness) as worker:
        publish(worker, Version(0, 0))
        train(worker, harness, 1)
        before = publish(worker, Version(0, 1))
        save(worker, harness, Version(0, 1))
        train(worker, harness, 2)
        harness.cut_save()
        # One that said `Saved` before it died has to keep its word.
        step = 2 if says_saved(worker, Version(0, 2)) else 1
    with drive(harness) as worker:
        comes_back(worker, Version(0, step))
        after = publish(worker, Version(1, step))
        if step == 1:
            check(after.digests == before.digests, "the checkpoint before is whole, but its weights are others")
        train(worker, harness, step + 1, epoch=1)
        save(worker, harness, Version(1, step + 1))
    with drive(harness) as worker:
        comes_back(worker, Version(1, step + 1))


def drive(harness: TrainerHarness) -> WorkerDrive:
    return WorkerDrive(harness.build, virtual=harness.virtual)


def publish(worker: WorkerDrive, version: Version) -> Manifest:
    """Have a version published that can be."""
    place = worker.mark()
    worker.send(Publish(version))
    answer = worker.until(lambda event: isinstance(event, Published | TrainerFailed), after=place)
    if not isinstance(answer, Published):
        raise ConformanceError(f"{version} is newer than all before it, but publishing it gave {answer}")
    check(answer.manifest.version == version, f"{version} was asked for, but {answer.manifest.version} was published")
    return answer.manifest


def train(worker: WorkerDrive, harness: TrainerHarness, step: int, *, epoch: int = 0) -> Trained:
    """One step on a good batch."""
    claim = ClaimId(100 + step)
    worker.send(Train(claim, Version(epoch, step), harness.batch(step)))
    answer = worker.until(lambda event: isinstance(event, Trained | TrainerFailed) and event.claim == claim)
    if not isinstance(answer, Trained):
        raise ConformanceError(f"a good batch is trained, but the answer was {answer}")
    return answer


def needs_checkpoints(harness: TrainerHarness) -> None:
    if not harness.saves:
        raise NotApplicable("the trainers of this harness have no place for checkpoints")


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
    """Have the current version saved."""
    needs_checkpoints(harness)
    answer = ask_to_save(worker, version)
    check(answer == Saved(version), f"the weights are those of {version} and can be saved, but the answer was {answer}")


def says_saved(worker: WorkerDrive, version: Version) -> bool:
    """Whether a trainer that dies of a `Save` said `Saved` before."""
    place = worker.mark()
    worker.send(Save(version))
    with suppress(ConformanceError):  # how the drive says that the worker is dead
        worker.settle()
    return Saved(version) in worker.events[place:]


def whole(store: WeightStore, manifest: Manifest) -> None:
    """What `Published` names is in the store, every bucket verified, every tensor inside its bucket."""
    check(store.newest() == manifest.version, f"{manifest.version} is the newest in the store, not {store.newest()}")
    held = store.manifest(manifest.version)
    check(held == manifest, "the manifest in the store is the one that was told")
    for index in range(len(manifest.digests)):
        try:
            verify_bucket(manifest, index, store.bucket(manifest.version, index))
        except WeightError as error:
            raise ConformanceError(f"a published version can be read as a whole, but {error}") from error
    for tensor in manifest.tensors:
        end = tensor.offset + tensor.nbytes
        check(end <= manifest.bucket_bytes[tensor.bucket], f"{tensor.name} ends behind the end of its bucket")


def describe(event: WorkerEvent) -> str:
    if isinstance(event, Published):
        return f"published {event.manifest.version}"
    if isinstance(event, Trained):
        return f"trained {event.claim}"
    if isinstance(event, Saved):
        return f"saved {event.version}"
    return str(event)


CASES: tuple[Case[TrainerHarness, None], ...] = SUITE.cases()
