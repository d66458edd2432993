"""Mutual authentication of a new link. Does no I/O; `link` sends and receives the messages.

    worker                                                     controller
    hello: id, worker nonce ─────────────────────────────────► looks up the secret of this id
                            ◄───────────────────────────────── challenge: controller nonce, proof(CONTROLLER)
    checks it; answer: proof(WORKER) ────────────────────────► checks it; the id is used up
    checks it               ◄───────────────────────────────── welcome: proof(WELCOME)

    proof(label) = HMAC-SHA256(secret, label, id, worker nonce, controller nonce)

Every worker has credentials of its own: a public id and a secret of 256 random bits, unrelated to each other.
Invariants:
- The secret is never sent, and the proofs do not reveal it.
- A proof is valid for one message of one connection: each message has its own label, so a proof cannot be reflected to
  its sender, and each side contributes a fresh nonce, so a recorded connection cannot be replayed to either of them.
- An unknown id is challenged like a known one and fails where a wrong proof fails: ids cannot be probed.
- All messages have a fixed size.
"""

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.types.errors import LinkError

ID_BYTES = 16
SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = ID_BYTES + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES

CONTROLLER = b"rollart link 1: controller"
WORKER = b"rollart link 1: worker"
WELCOME = b"rollart link 1: welcome"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What identifies one worker to the controller and the controller to that worker. Valid for one connection."""

    id: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> "Credentials":
        return cls(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))


class WorkerHandshake:
    """The worker's side of one connection.

    >>> credentials = Credentials.new()
    >>> worker = WorkerHandshake(credentials)
    >>> controller = ControllerHandshake(worker.hello, {credentials.id: credentials.secret}.get)
    >>> worker.check_welcome(controller.welcome(worker.answer(controller.challenge)))
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._nonces = secrets.token_bytes(NONCE_BYTES)
        self.hello = credentials.id + self._nonces

    def answer(self, challenge: bytes) -> bytes:
        """Check the controller's proof and return ours; raises `LinkError` if it is wrong."""
        nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        self._nonces += nonce
        self._check(proof, CONTROLLER)
        return _proof(self._credentials, WORKER, self._nonces)

    def check_welcome(self, welcome: bytes) -> None:
        self._check(welcome, WELCOME)

    def _check(self, proof: bytes, label: bytes) -> None:
        if not hmac.compare_digest(proof, _proof(self._credentials, label, self._nonces)):
            raise LinkError("it could not prove that it is the controller of this worker")


class ControllerHandshake:
    """The controller's side of one connection, from the hello on."""

    def __init__(self, hello: bytes, secret_of: Callable[[bytes], bytes | None]) -> None:
        self.id, worker_nonce = hello[:ID_BYTES], hello[ID_BYTES:]
        # A secret that nobody has makes an unknown id fail like a wrong proof.
        self._credentials = Credentials(self.id, secret_of(self.id) or secrets.token_bytes(SECRET_BYTES))
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = worker_nonce + nonce
        self.challenge = nonce + _proof(self._credentials, CONTROLLER, self._nonces)

    def welcome(self, answer: bytes) -> bytes:
        """Check the worker's proof and return the last message; raises `LinkError` if it is wrong."""
        if not hmac.compare_digest(answer, _proof(self._credentials, WORKER, self._nonces)):
            raise LinkError("it could not prove that it is a worker of this run")
        return _proof(self._credentials, WELCOME, self._nonces)


def _proof(credentials: Credentials, label: bytes, nonces: bytes) -> bytes:
    # Unambiguous without separators: only the label varies in length.
    return hmac.digest(credentials.secret, label + credentials.id + nonces, "sha256")
