"""Architecture of a checkpoint, parsed from its `config.json`; unsupported features are refused by name.

Reads the same settings as `backends.models` without importing transformers, which takes seconds. Invariant: for an
accepted config, `decoder` computes exactly the function that transformers does; defaults are those of transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.types.errors import RequestError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")
SUPPORTED = (
    f"model types {', '.join(FAMILIES)}; full attention with rotary positions of type {', '.join(ROPE_TYPES)}; "
    "silu; weights that are not quantised"
)
_DEFAULT_INTERMEDIATE = {"llama": 11008, "qwen2": 22016, "qwen3": 22016}
_DEFAULT_VOCABULARY = {"llama": 32000, "qwen2": 151936, "qwen3": 151936}
_DEFAULT_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_ROPE_NEEDS = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ROPE_OPTIONS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """Rotary positions; `options` holds the numeric options of `kind`."""

    kind: str
    theta: float
    original_positions: int
    options: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Architecture of a decoder-only model, as far as it is supported here."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    positions: int
    """Context length the model was trained for; a longer one is the user's choice."""
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    rope: RopeShape

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the state dict, in order; a tied output head is included under its own name."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                out[f"{layer}.self_attn.{name}_proj.weight"] = (rows, self.hidden)
                if self.qkv_bias:
                    out[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
            out[f"{layer}.self_attn.o_proj.weight"] = (self.hidden, queries)
            if self.output_bias:
                out[f"{layer}.self_attn.o_proj.bias"] = (self.hidden,)
            if self.qk_norm:
                out[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                out[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            out[f"{layer}.mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            out[f"{layer}.mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            out[f"{layer}.mlp.down_proj.weight"] = (self.hidden, self.intermediate)
            out[f"{layer}.input_layernorm.weight"] = (self.hidden,)
            out[f"{layer}.post_attention_layernorm.weight"] = (self.hidden,)
        out["model.norm.weight"] = (self.hidden,)
        out["lm_head.weight"] = (self.vocabulary, self.hidden)
        return out


def read_shape(model: str | Mapping[str, Any]) -> ModelShape:
    """Shape of a `model` setting: a folder with a `config.json`, or `{"config": {…}}`."""
    if isinstance(model, str):
        path = Path(model) / "config.json"
        if not path.is_file():
            raise RequestError(
                f"model {model!r} is not a folder with a config.json; give a local checkpoint or a config"
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RequestError(f"{path} is not JSON ({error}); download the checkpoint again") from error
        if not isinstance(config, dict):
            raise RequestError(f"{path} holds no JSON object; download the checkpoint again")
        return parse_config(config)
    if set(model) != {"config"}:
        raise RequestError(f"a model is a folder or {{'config': {{…}}}}, but its keys are {sorted(model)}")
    return parse_config({"model_type": "qwen3", **model["config"]})


def parse_config(config: Mapping[str, Any]) -> ModelShape:
    """Shape described by a `config.json`; a `RequestError` names what is not supported and what is."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise _refusal(f"model_type {family!r}")
    _refuse_variants(config)
    heads = _count(config, "num_attention_heads", 32)
    hidden = _count(config, "hidden_size", 4096)
    kv_heads = _count(config, "num_key_value_heads", heads if family == "llama" else 32, heads)
    # Qwen3 has its own default; the other families divide, as do all if the key is null.
    head_dim = _count(config, "head_dim", 128 if family == "qwen3" else hidden // heads, hidden // heads)
    if heads % kv_heads:
        raise _refusal(f"{heads} attention heads over {kv_heads} key-value heads")
    if head_dim % 2:
        raise _refusal(f"a head_dim of {head_dim}")
    attention_bias = bool(config.get("attention_bias", False)) and family != "qwen2"
    positions = _count(config, "max_position_embeddings", _DEFAULT_POSITIONS[family])
    return ModelShape(
        family=family,
        vocabulary=_count(config, "vocab_size", _DEFAULT_VOCABULARY[family]),
        hidden=hidden,
        intermediate=_count(config, "intermediate_size", _DEFAULT_INTERMEDIATE[family]),
        layers=_count(config, "num_hidden_layers", 32),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        positions=positions,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        qk_norm=family == "qwen3",
        rope=_rope(config, positions),
    )


def _refuse_variants(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise _refusal(f"quantisation {method!r}")
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise _refusal(f"layers of type {', '.join(kinds)}")
    if config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None:
        layers = int(config.get("num_hidden_layers", 32))
        if int(config.get("max_window_layers", 28)) < layers and not config.get("layer_types"):
            raise _refusal("a sliding window (use_sliding_window)")
    if config.get("hidden_act", "silu") != "silu":
        raise _refusal(f"hidden_act {config['hidden_act']!r}")
    if config.get("mlp_bias"):
        raise _refusal("mlp_bias")


def _rope(config: Mapping[str, Any], positions: int) -> RopeShape:
    """Both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise _refusal(f"rope type {kind!r}")
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _refusal("partial_rotary_factor")
    missing = [name for name in _ROPE_NEEDS[kind] if name not in given]
    if missing:
        raise RequestError(f"the config has rope type {kind!r} without {', '.join(missing)}; complete it")
    theta = given.get("rope_theta", config.get("rope_theta"))
    original = given.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    return RopeShape(
        kind=kind,
        theta=10000.0 if theta is None else float(theta),
        original_positions=positions if original is None else int(original),
        options={name: float(given[name]) for name in _ROPE_OPTIONS if isinstance(given.get(name), int | float)},
    )


def _count(config: Mapping[str, Any], name: str, default: int, null: int | None = None) -> int:
    value = config.get(name, default)
    if value is None and null is not None:
        value = null
    if not isinstance(value, int) or value < 1:
        raise RequestError(f"the config has {name} = {value!r}, which is not a number of at least 1; correct it")
    return value


def _refusal(what: str) -> RequestError:
    return RequestError(f"this engine does not support {what}; supported are {SUPPORTED}")
