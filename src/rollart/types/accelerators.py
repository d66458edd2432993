"""Data sheets of accelerators: what an estimate of their speed and memory starts from."""

import msgspec


class Accelerator(msgspec.Struct, frozen=True, gc=False):
    """One device. Rates are those of the data sheet: dense, 16 bit."""

    tflops: float
    memory_gb: float
    tb_s: float


ACCELERATORS = {
    "A100": Accelerator(312.0, 80.0, 2.0),
    "A800": Accelerator(312.0, 80.0, 2.0),
    "H100": Accelerator(989.5, 80.0, 3.35),
    "H200": Accelerator(989.5, 141.0, 4.8),
    "H20": Accelerator(148.0, 96.0, 4.0),
    "H800": Accelerator(989.5, 80.0, 3.35),
    "L40S": Accelerator(362.0, 48.0, 0.864),
}
CORE = Accelerator(0.02, 0.0, 0.01)
"""A processor core: an assumption. Its memory is that of its node."""
UNKNOWN = Accelerator(300.0, 0.0, 2.0)
"""A GPU without a data sheet here; its memory is not checked."""
PREFILL_EFFICIENCY = 0.55
TRAIN_EFFICIENCY = 0.40
BANDWIDTH_EFFICIENCY = 0.75
"""Shares of the data sheet that engines and trainers typically reach; assumptions, as in `sim.hardware`."""
