"""Ranks of a trainer on the private Ray of one machine: nothing is reserved."""

import asyncio

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from ray_workers import wait_until
from test_ray_ranks import Listener, Trainer, ranks_of, train

from rollart.distributed.ray_placement import read_workers
from rollart.distributed.ray_runtime import RayRuntime
from rollart.types.messages import Trained


@pytest.mark.usefixtures("local_ray")
def test_ranks_train_and_end_with_their_worker(tmp_path):
    async def main():
        runtime, listener = RayRuntime(tmp_path / "logs"), Listener()
        runtime.listen(listener)
        trainer = Trainer(runtime, listener, tmp_path, ranks=2)
        try:
            await trainer.start()
            assert isinstance(await trainer.ask(train(1)), Trained)
            assert set(ranks_of(tmp_path / "logs")) == {1}
            assert read_workers() == []
        finally:
            await runtime.close()

    asyncio.run(main())
    wait_until(lambda: not ranks_of(tmp_path / "logs"))
