"""The handshake of a link, message by message: what either side refuses."""

import pytest

from rollart.distributed.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    ID_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ControllerHandshake,
    Credentials,
    WorkerHandshake,
)
from rollart.types.errors import LinkError

NOT_A_WORKER = "could not prove that it is a worker of this run"
NOT_THE_CONTROLLER = "could not prove that it is the controller of this worker"

KNOWN = Credentials.new()


def worker(credentials=KNOWN):
    return WorkerHandshake(credentials)


def controller(hello):
    return ControllerHandshake(hello, {KNOWN.id: KNOWN.secret}.get)


def flipped(message, at):
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


def test_both_are_convinced_by_messages_of_fixed_size():
    ours = worker()
    theirs = controller(ours.hello)
    answer = ours.answer(theirs.challenge)
    welcome = theirs.welcome(answer)
    ours.check_welcome(welcome)
    assert theirs.id == KNOWN.id
    messages = [ours.hello, theirs.challenge, answer, welcome]
    assert list(map(len, messages)) == [HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES, PROOF_BYTES]
    assert KNOWN.secret not in b"".join(messages)


def test_credentials_are_random_and_do_not_show_their_secret():
    made = [Credentials.new() for _ in range(100)]
    assert len({each.id for each in made} | {each.secret for each in made}) == 200
    assert repr(made[0].secret) not in repr(made[0])
    assert made[0].secret.hex() not in repr(made[0])


def test_a_worker_with_another_secret_is_refused():
    theirs = controller(worker().hello)
    guess = WorkerHandshake(Credentials(KNOWN.id, Credentials.new().secret))
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        guess.answer(theirs.challenge)
    with pytest.raises(LinkError, match=NOT_A_WORKER):
        theirs.welcome(bytes(PROOF_BYTES))


def test_an_unknown_id_looks_like_a_wrong_proof():
    errors, challenges = [], []
    for credentials in (KNOWN, Credentials.new()):
        theirs = controller(worker(credentials).hello)
        challenges.append(theirs.challenge)
        with pytest.raises(LinkError) as refused:
            theirs.welcome(bytes(PROOF_BYTES))
        errors.append(str(refused.value))
    assert errors[0] == errors[1]
    assert [len(challenge) for challenge in challenges] == [CHALLENGE_BYTES] * 2


def test_an_unknown_id_gets_another_challenge_each_time():
    hello = worker(Credentials.new()).hello
    assert controller(hello).challenge != controller(hello).challenge


@pytest.mark.parametrize("secret", [b"", bytes(32)])
def test_a_trivial_secret_does_not_open_an_unknown_id(secret):
    stranger = worker(Credentials(Credentials.new().id, secret))
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        stranger.answer(controller(stranger.hello).challenge)


def test_a_recorded_worker_is_refused():
    ours = worker()
    answer = ours.answer(controller(ours.hello).challenge)
    with pytest.raises(LinkError, match=NOT_A_WORKER):
        controller(ours.hello).welcome(answer)


def test_a_recorded_controller_is_refused():
    ours = worker()
    recorded = controller(ours.hello)
    welcome = recorded.welcome(ours.answer(recorded.challenge))
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        worker().answer(recorded.challenge)
    later = worker()
    later.answer(controller(later.hello).challenge)
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        later.check_welcome(welcome)


def test_a_proof_cannot_be_sent_back_to_its_maker():
    ours = worker()
    theirs = controller(ours.hello)
    with pytest.raises(LinkError, match=NOT_A_WORKER):
        theirs.welcome(theirs.challenge[NONCE_BYTES:])
    answer = ours.answer(theirs.challenge)
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        ours.check_welcome(answer)
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        ours.check_welcome(theirs.challenge[NONCE_BYTES:])


@pytest.mark.parametrize("at", [0, NONCE_BYTES - 1, NONCE_BYTES, CHALLENGE_BYTES - 1])
def test_a_changed_challenge_is_refused(at):
    ours = worker()
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        ours.answer(flipped(controller(ours.hello).challenge, at))


@pytest.mark.parametrize("at", [0, ID_BYTES, HELLO_BYTES - 1])
def test_a_changed_hello_is_refused(at):
    ours = worker()
    with pytest.raises(LinkError, match=NOT_THE_CONTROLLER):
        ours.answer(controller(flipped(ours.hello, at)).challenge)
