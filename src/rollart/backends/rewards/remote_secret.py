"""The secret of a function behind a URL: read from the environment, sent or signed with, and kept out of everything
else."""

import os
import time

from rollart.types.errors import RequestError
from rollart.types.reward_signature import HEADER, signature

BEARER = "bearer"
SIGNATURE = "signature"
HIDDEN = "[secret]"


class RemoteSecret:
    """Headers that authenticate a request. `repr` does not show the secret."""

    def __init__(self, variable: str, sent_as: str) -> None:
        """`variable` is empty where a function needs no secret."""
        if sent_as not in (BEARER, SIGNATURE):
            raise RequestError(f"secret_as: {sent_as!r} is neither {BEARER!r} nor {SIGNATURE!r}")
        self._variable = variable
        self._sent_as = sent_as
        self._secret = os.environ.get(variable, "") if variable else ""
        if variable and not self._secret:
            raise RequestError(
                f"the environment variable {variable} is not set where the reward worker runs; it holds the secret of "
                "a reward function. Set it on this machine, on a cluster on every node that may run reward workers."
            )
        if not self._secret.isascii() or any(char.isspace() for char in self._secret):
            raise RequestError(f"the secret in {variable} has spaces or characters that are not ASCII; remove them")

    def __repr__(self) -> str:
        return f"RemoteSecret({self._variable!r})"

    def headers(self, body: bytes) -> dict[str, str]:
        """Headers that authenticate a request with this body."""
        if not self._secret:
            return {}
        if self._sent_as == BEARER:
            return {"Authorization": f"Bearer {self._secret}"}
        return {HEADER: signature(self._secret, time.time(), body)}

    def removed_from(self, text: str) -> str:
        """The text without the secret, in case a service repeats it in an error."""
        return text.replace(self._secret, HIDDEN) if self._secret else text
