"""A causal language model of `transformers` on packed rows: log-probabilities of a micro-batch's action tokens.

Invariants:
- Layers, embeddings and head are those of `transformers`; only the attention function is ours (`packed_attention`).
- Only positions that predict an action go through the last MLP and the output head.
- A model whose packed rows differ from its sequences one by one is refused at load time, by name: both are computed on
  a few tokens and compared, so no list of supported classes is needed.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rollart.backends.models import token_logprobs
from rollart.backends.trainers.native_layers import use_native_kernels
from rollart.backends.trainers.packed_attention import LAST, NAME, Branch, Layout, UnsupportedAttention
from rollart.backends.trainers.packing import Item, MicroBatch, micro_batches
from rollart.types.errors import RequestError
from rollart.types.ids import TrajectoryId

KNOWN_TO_WORK = ("llama", "qwen2", "qwen3")
"""Tested on every change; other models with plain causal attention work too and are checked when loaded."""
LARGEST_DIFFERENCE = 1e-3
"""Tolerance of logits, relative to the largest: far above float32 rounding, far below the effect of a wrong mask."""


class Scores(NamedTuple):
    """One value per action token, in the order of the micro-batch's items."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    """(action tokens, width): the state each was predicted from, as seen by the output head."""


class Row(NamedTuple):
    """A micro-batch as model input."""

    tokens: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    """Position that predicts each action token."""
    targets: torch.Tensor
    layout: Layout


class PackedModel:
    """The model step of a trainer. `compute` is the precision of the layers; parameters keep their own."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        compute: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._temperature = temperature
        self._compute = torch.float32
        _switch_attention(self, model)
        self._compute = compute
        if gradient_checkpointing:
            _checkpoint_layers(model)

    def scores(self, batch: MicroBatch, *, entropy: bool = False, hidden: bool = False) -> Scores:
        """Log-probabilities at the engines' temperature, and optional extras, all with gradient."""
        row = pack_row(batch, self.model.device)
        seen: torch.Tensor | None = None
        if hidden:
            logits, seen = self._with_hidden(row)
        else:
            logits = self.logits(row)
        logprobs = token_logprobs(logits, row.targets, self._temperature)
        spread: torch.Tensor | None = None
        if entropy:
            every = torch.log_softmax(logits.float() / self._temperature, dim=-1)
            spread = -(every.exp() * every).sum(-1)
        return Scores(logprobs, spread, seen)

    def _with_hidden(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Capture the input of the output head, which sees exactly the kept positions in any model."""
        seen: list[torch.Tensor] = []
        head = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _head, inputs: seen.append(inputs[0][0]))
        try:
            logits = self.logits(row)
        finally:
            handle.remove()
        return logits, seen[0]

    def logits(self, row: Row) -> torch.Tensor:
        """(action tokens, vocabulary)."""
        with self._autocast():
            output = self.model(
                row.tokens[None],
                position_ids=row.positions[None],
                use_cache=False,
                logits_to_keep=row.keep,
                layout=row.layout,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self._compute)


def pack_row(batch: MicroBatch, device: torch.device) -> Row:
    """Concatenate sequences, each from where it diverges from the previous one; positions count within a sequence."""
    tokens: list[np.ndarray[Any, Any]] = []
    positions: list[np.ndarray[Any, Any]] = []
    keep: list[np.ndarray[Any, Any]] = []
    branches = []
    end = 0
    for tree in batch.trees:
        rows = np.empty(0, dtype=np.int64)  # positions of the previous sequence's tokens
        for member, common in zip(tree.members, tree.common, strict=True):
            own = member.fed[common:]
            rows = np.concatenate((rows[:common], np.arange(end, end + own.size)))
            tokens.append(own)
            positions.append(np.arange(common, member.fed.size))
            keep.append(rows[member.sources])
            branches.append(Branch(common, own.size))
            end += own.size
    return Row(
        tokens=_tensor(tokens, device),
        positions=_tensor(positions, device),
        keep=_tensor(keep, device),
        targets=_tensor([item.targets for item in batch.items], device),
        layout=Layout(branches, kept=np.unique(np.concatenate(keep))),
    )


def _tensor(parts: Sequence[np.ndarray[Any, Any]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def _switch_attention(packed: PackedModel, model: Any) -> None:
    """Switch to packed attention and native layers, and verify that the outputs do not change."""
    probe = _probe(packed.vocabulary)
    row = pack_row(probe, model.device)
    try:
        with torch.no_grad():
            alone = [_alone(model, item) for item in probe.items]
            model.set_attn_implementation(NAME)
            use_native_kernels(model)
            _thin_last_layer(model)
            together = packed.logits(row)
    except (UnsupportedAttention, ValueError, TypeError) as error:
        raise _refusal(model, str(error)) from error
    layers = int(model.config.get_text_config().num_hidden_layers)
    if row.layout.calls != layers:
        raise _refusal(model, f"only {row.layout.calls} of its {layers} layers have a replaceable attention function")
    expected = torch.cat(alone)
    difference = float((together - expected).abs().max() / expected.abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise _refusal(model, f"its logits on packed sequences differ by {difference:.1e} from those one by one")


def _thin_last_layer(model: Any) -> None:
    """Restrict the last layer's queries and MLP to the positions used afterwards."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    mlp: Any = getattr(layers[-1], "mlp", None) if layers else None
    if not type(mlp).__name__.endswith("MLP"):
        return
    for module in layers[-1].modules():
        setattr(module, LAST, True)
    whole = mlp.forward
    layout: Layout | None = None

    def note(_layer: Any, _inputs: Any, named: Mapping[str, Any]) -> None:
        # Under gradient checkpointing the layer is called again for its backward pass, so this is always its own row.
        nonlocal layout
        layout = named.get("layout")

    def forward(x: torch.Tensor, *others: Any) -> torch.Tensor:
        if layout is None or others:
            return whole(x, *others)  # type: ignore[no-any-return]
        kept = torch.from_numpy(layout.kept).to(x.device)
        some: torch.Tensor = whole(x.index_select(1, kept))
        return some.new_zeros(*x.shape[:-1], some.shape[-1]).index_copy(1, kept, some)

    layers[-1].register_forward_pre_hook(note, with_kwargs=True)
    mlp.forward = forward


def _probe(vocabulary: int) -> MicroBatch:
    """Three sequences that diverge at different positions, and an unrelated one."""
    rows = []
    for number, (common, length) in enumerate(((0, 17), (9, 15), (12, 19), (0, 8))):
        tokens = ((np.arange(length) * (7 if length > 8 else 11) + 3) % vocabulary).astype(np.int32)
        tokens[common:] = (tokens[common:] + number) % vocabulary
        actions = np.arange(4, length)
        rows.append(
            Item(
                trajectory=TrajectoryId(number),
                fed=tokens[:-1],
                sources=actions - 1,
                targets=tokens[actions],
                behaviour=np.zeros(actions.size, dtype=np.float32),
                turns=np.zeros(actions.size, dtype=np.int64),
                advantages=np.zeros(actions.size, dtype=np.float32),
            )
        )
    (batch,) = micro_batches(rows, 1024)
    return batch


def _alone(model: Any, item: Item) -> torch.Tensor:
    """The model's own logits for one sequence."""
    logits: torch.Tensor = model(_tensor([item.fed], model.device)[None], use_cache=False).logits[0]
    return logits[torch.from_numpy(item.sources).to(model.device)]


def _refusal(model: Any, why: str) -> RequestError:
    return RequestError(
        f"{type(model).__name__} cannot be trained on packed sequences: {why}. Supported are models with plain causal "
        f"attention that `transformers` makes replaceable, among them {', '.join(KNOWN_TO_WORK)}; the reference "
        "trainer takes any model."
    )


def _checkpoint_layers(model: Any) -> None:
    """Layers keep only their inputs and are recomputed in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # Only the layer itself is set to training mode, which enables checkpointing; its children stay in
            # evaluation mode, without dropout.
            module.training = True
