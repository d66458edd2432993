"""The random initial model of a LoRA run, as a folder: an adapter cannot be loaded without its base model.

    python -m rollart.app.initial_model '{"folder": "model", "model": {"config": {…}}, "seed": 0}'

creates it. The process exits when its standard input is closed.
"""

import json
import sys
from pathlib import Path

from rollart.app.cold_start import end_with_parent
from rollart.backends.models import build_model
from rollart.backends.trainers.training_state import write_model


def _main(order: str) -> None:
    end_with_parent()
    wanted = json.loads(order)
    model = build_model(wanted["model"], dtype="float32", device="cpu", seed=wanted["seed"])
    write_model(Path(wanted["folder"]), wanted["model"], model)


if __name__ == "__main__":
    _main(sys.argv[1])
