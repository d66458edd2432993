"""`rollart.run` in a notebook: it runs, finds the classes of the cells, and a stopped cell stops the run in order."""

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollart.app.interruption import Interruption, in_own_thread

README = Path(__file__).parents[2] / "README.md"
LOAD = """
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained(result.checkpoint).num_parameters())
"""


def shortened() -> str:
    """The example on the first page, with fewer steps and episodes."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for long, short in (("steps=60, eval_every=60", "steps=2, eval_every=2"), ("eval_episodes=32", "eval_episodes=4")):
        assert long in code
        code = code.replace(long, short)
    return code


@pytest.mark.timeout(300)
def test_the_example_runs_in_a_cell_and_its_model_is_loaded_in_the_next(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    from nbformat.v4 import new_code_cell, new_notebook

    notebook = new_notebook(cells=[new_code_cell(shortened()), new_code_cell(LOAD)])
    nbclient.NotebookClient(
        notebook, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    example, loaded = (
        {name: "".join(out.text for out in cell.outputs if out.get("name") == name) for name in ("stdout", "stderr")}
        for cell in notebook.cells
    )
    assert re.fullmatch(r"HeldOut\(before=[\d.]+, after=[\d.]+\) runs/run-1/checkpoints/\S+\n", example["stdout"])
    assert "step 2/2" in example["stderr"]
    assert "load it with: AutoModelForCausalLM.from_pretrained(" in example["stderr"]
    assert int(loaded["stdout"]) > 50_000


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """Enable Ctrl-C, which a shell disables for background processes such as these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def stopped(run: Callable[[Interruption], str], log: list[str]) -> str:
    """What comes of a run that is started inside an event loop of the main thread."""
    assert threading.current_thread() is threading.main_thread()

    async def cell() -> str:
        return in_own_thread(log.append, run)

    return asyncio.run(cell())


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_the_run_in_order() -> None:
    log: list[str] = []

    async def training() -> None:
        log.append("began")
        try:
            interrupt()
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            log.append("flushed")

    def run(interruption: Interruption) -> str:
        try:
            interruption.cancels(training())
        except KeyboardInterrupt:
            return "stopped"
        return "done"

    before = signal.getsignal(signal.SIGINT)
    assert stopped(run, log) == "stopped"
    assert log == ["began", "stopping; interrupt again to stop waiting for it", "flushed"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_run_has_begun_keeps_it_from_beginning() -> None:
    log: list[str] = []

    async def training() -> None:
        log.append("began")

    def run(interruption: Interruption) -> str:
        interrupt()
        while not log:  # the main thread handles it
            os.sched_yield()
        with pytest.raises(KeyboardInterrupt):
            interruption.cancels(training())
        return "stopped"

    assert stopped(run, log) == "stopped"
    assert log == ["stopping; interrupt again to stop waiting for it"]


def test_a_second_ctrl_c_gives_the_cell_back() -> None:
    log: list[str] = []
    released = threading.Event()

    def run(_: Interruption) -> str:
        interrupt()
        while not log:
            os.sched_yield()
        interrupt()
        released.wait()
        return "stopped"

    with pytest.raises(KeyboardInterrupt):
        stopped(run, log)
    released.set()


def test_what_the_run_raises_is_raised_in_the_cell() -> None:
    def run(_: Interruption) -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        stopped(run, [])
