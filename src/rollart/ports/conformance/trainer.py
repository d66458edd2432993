"""Conformance of trainers: workers that speak `Train` and `Publish`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rollart.ports.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.conformance.drive import WorkerDrive
from rollart.ports.weights import WeightStore
from rollart.ports.worker import Worker
from rollart.types.errors import WeightError
from rollart.types.ids import ClaimId
from rollart.types.messages import Publish, Published, Train, Trained, TrainerFailed, TrainerInfo, WorkerEvent
from rollart.types.trajectory import TrainSample
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket

SUITE = Suite["TrainerHarness", None]()


@dataclass(kw_only=True)
class TrainerHarness:
    """A fresh trainer, the store it publishes to, and batches for it."""

    build: Callable[[Callable[[], None]], Worker]
    store: WeightStore
    batch: Callable[[int], tuple[TrainSample, ...]]
    """The i-th batch; one that changes the weights."""
    virtual: bool
    bad_batch: tuple[TrainSample, ...] | None = None
    """A batch that cannot be trained."""
    weights_change: bool = True
    """Whether training changes the bytes that are published; not in a simulation."""


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
        if harness.weights_change:
            check(
                second.digests != first.digests, "one optimiser step changes the weights, but their digests are equal"
            )


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
    if harness.weights_change:
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
        if harness.weights_change:
            second = publish(worker, Version(0, 1))
            check(second.digests == first.digests, "after a failure the weights are those of before")


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
    return str(event)


CASES: tuple[Case[TrainerHarness, None], ...] = SUITE.cases()
