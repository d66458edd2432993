"""Hardware model: how long work takes, from first principles. Replace this module to use another model.

The rest of `sim` asks `Roofline` for seconds and tokens and contains no GPU constants. Times are sums and maxima of
work over rate, so they are positive, grow with the work, and need no calibration run:

    P parameters, L layers, H hidden width, A = query heads × head size, r ranks of one replica
    F = r · TFLOPS · MFU            FLOP/s that a replica reaches
    B = r · TB/s · efficiency       bytes/s from its HBM

The rates are the paper's data sheet. The efficiencies are assumptions: typical values of serving and training engines,
the same for both GPU classes so that the classes differ only by their data sheets; none was fitted to the paper.
Training time is a lower bound: it omits attention, activation recompute, padding and the optimiser's traffic, and is at
most a quarter of the one training time given in the paper (a test pins the figures).
"""

from functools import lru_cache

from pydantic import Field

from rollart.config.base import Strict
from rollart.types.errors import RequestError


class Hardware(Strict):
    """One device of a class. `cost` is relative, per device and hour."""

    name: str
    tflops: float = Field(gt=0)
    """Dense, 16 bit."""
    hbm_gb: float = Field(gt=0)
    hbm_tb_s: float = Field(gt=0)
    nvlink_gb_s: float = Field(gt=0)
    cost: float = Field(ge=0)
    prefill_mfu: float = Field(default=0.55, gt=0, le=1)
    train_mfu: float = Field(default=0.40, gt=0, le=1)
    bandwidth_efficiency: float = Field(default=0.75, gt=0, le=1)
    hbm_share: float = Field(default=0.90, gt=0, le=1)
    """Share of memory available to weights and KV cache."""
    step_overhead_s: float = Field(default=0.002, ge=0)
    """Cost of a decode step outside the device: scheduling, launches, sampling."""


H20 = Hardware(name="H20", tflops=148.0, hbm_gb=96.0, hbm_tb_s=4.0, nvlink_gb_s=900.0, cost=1.00)
H800 = Hardware(name="H800", tflops=989.5, hbm_gb=80.0, hbm_tb_s=3.35, nvlink_gb_s=400.0, cost=2.85)
FAST = Hardware(name="fast", tflops=2.0, hbm_gb=1.0, hbm_tb_s=0.01, nvlink_gb_s=10.0, cost=2.0, step_overhead_s=0.0005)
"""A CPU-class device with more arithmetic: better at prefill and training."""
WIDE = Hardware(name="wide", tflops=0.5, hbm_gb=1.0, hbm_tb_s=0.04, nvlink_gb_s=10.0, cost=1.0, step_overhead_s=0.0005)
"""A CPU-class device with more bandwidth: better at decode, up to batches of about 32; then arithmetic binds."""

HARDWARE = {hardware.name: hardware for hardware in (H20, H800, FAST, WIDE)}


class ModelProfile(Strict):
    """The shape of a dense decoder, which determines its costs."""

    name: str
    params: int = Field(gt=0)
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    bytes_per_param: float = Field(default=2.0, gt=0)

    @property
    def weight_bytes(self) -> int:
        """P · bytes per parameter."""
        return int(self.params * self.bytes_per_param)

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of every layer, 16 bit: 2 · L · KV heads · head size · 2."""
        return 4 * self.layers * self.kv_heads * self.head_dim


QWEN3_8B = ModelProfile(
    name="qwen3-8b", params=8_190_000_000, layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128
)
QWEN3_14B = ModelProfile(
    name="qwen3-14b", params=14_770_000_000, layers=40, hidden=5120, heads=40, kv_heads=8, head_dim=128
)
QWEN3_32B = ModelProfile(
    name="qwen3-32b", params=32_760_000_000, layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128
)
TINY = ModelProfile(name="tiny", params=10_000_000, layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64)

MODELS = {model.name: model for model in (QWEN3_8B, QWEN3_14B, QWEN3_32B, TINY)}


class Roofline:
    """Times of one replica: `ranks` devices that share one copy of the model (tensor parallel)."""

    def __init__(self, hardware: Hardware, model: ModelProfile, ranks: int = 1) -> None:
        if ranks < 1:
            raise RequestError(f"a replica of {model.name} on {hardware.name} needs at least 1 rank, not {ranks}")
        self.hardware = hardware
        self.model = model
        self.ranks = ranks
        prefill_flops = ranks * hardware.tflops * 1e12 * hardware.prefill_mfu
        bandwidth = ranks * hardware.hbm_tb_s * 1e12 * hardware.bandwidth_efficiency
        attention_flops = 4 * model.layers * model.heads * model.head_dim
        # Two all-reduces of the hidden state per layer; a ring moves 2·(r−1)/r of it over every link.
        shared = 2 * model.layers * model.hidden * 2 * 2 * (ranks - 1) / ranks / (hardware.nvlink_gb_s * 1e9)
        self._token_s = 2 * model.params / prefill_flops
        self._pair_s = attention_flops / prefill_flops
        self._shared_s = shared
        self._weights_s = model.weight_bytes / bandwidth
        self._kv_s = model.kv_bytes_per_token / bandwidth
        self._overhead_s = hardware.step_overhead_s
        train_flops = ranks * hardware.tflops * 1e12 * hardware.train_mfu
        self._train_token_s = 6 * model.params / train_flops
        self._forward_token_s = 2 * model.params / train_flops

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        """Time to compute `new_tokens` after `context_tokens` with existing KV. With n new after c:

            (2·P·n + 4·L·A·(n·c + n²/2)) / F  +  n · all-reduce

        Bound by arithmetic alone: prefills share their pass over the weights with each other and with decode steps.
        """
        pairs = new_tokens * (context_tokens + 0.5 * new_tokens)
        return new_tokens * (self._token_s + self._shared_s) + pairs * self._pair_s

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """Time of one token for each of `batch` requests that attend to `kv_tokens` in total:

        max((weights + KV bytes) / B,  (2·P·batch + 4·L·A·kv_tokens) / F)  +  batch · all-reduce  +  overhead
        """
        moved_s = self._weights_s + kv_tokens * self._kv_s
        computed_s = batch * self._token_s + kv_tokens * self._pair_s
        return (moved_s if moved_s > computed_s else computed_s) + batch * self._shared_s + self._overhead_s

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits beside the weights: (r · HBM · share − weights) / KV bytes."""
        room = self.ranks * self.hardware.hbm_gb * 1e9 * self.hardware.hbm_share - self.model.weight_bytes
        tokens = int(room // self.model.kv_bytes_per_token)
        if tokens < 2:
            raise RequestError(
                f"{self.model.name} does not fit on {self.ranks} × {self.hardware.name} "
                f"({self.hardware.hbm_gb:g} GB each): give the replica more ranks"
            )
        return tokens

    def train_s(self, tokens: int) -> float:
        """Forward, backward and optimiser: 6·P·tokens / (r · TFLOPS · training MFU)."""
        return tokens * self._train_token_s

    def forward_s(self, tokens: int) -> float:
        """One forward pass of the trainer, for log-probabilities: 2·P·tokens / (r · TFLOPS · training MFU)."""
        return tokens * self._forward_token_s

    @staticmethod
    def transfer_s(nbytes: int, gb_s: float) -> float:
        """Time of `nbytes` over a link of `gb_s` GB/s."""
        return nbytes / (gb_s * 1e9)


@lru_cache(maxsize=64)
def shared_roofline(hardware: Hardware, model: ModelProfile, ranks: int) -> Roofline:
    """One instance for all replicas of a kind: a thousand copies would not stay in the processor's cache."""
    return Roofline(hardware, model, ranks)
