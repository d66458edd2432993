"""The function in a replica of a platform. Imports little, because every cold start does."""

import msgspec

from rollart.app.functions.executor import LocalExecutor
from rollart.types.reward_wire import FunctionCall


class ReplicaFunction:
    """A call in, an answer out, both as bytes."""

    def __init__(self, function: str) -> None:
        self._executor = LocalExecutor(function, 1)

    async def __call__(self, call: bytes) -> bytes:
        return msgspec.json.encode(await self._executor.run(msgspec.json.decode(call, type=FunctionCall)))
