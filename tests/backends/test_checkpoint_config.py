import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.backends.engines.checkpoint_config import ROPE_TYPES, parse_config, read_shape
from rollart.types.errors import RequestError

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2, "head_dim": 16}, {"attention_bias": True}])
def test_names_and_shapes_are_those_of_transformers(family, changes):
    config = {"model_type": family, **SMALL, "num_key_value_heads": 4, **changes}
    if family == "qwen2":
        config.pop("head_dim", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert parse_config(config).tensors() == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_what_transformers_takes(family):
    theirs = AutoConfig.for_model(family)
    ours = parse_config({"model_type": family})
    assert ours == parse_config(json.loads(theirs.to_json_string(use_diff=False)))
    assert ours.hidden == theirs.hidden_size
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_a_folder_has_a_config(tmp_path):
    with pytest.raises(RequestError, match=r"not a folder with a config\.json"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RequestError, match="no JSON object"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert read_shape(str(tmp_path)) == read_shape({"config": {"model_type": "llama", **SMALL}})


def test_a_setting_is_a_folder_or_a_config():
    with pytest.raises(RequestError, match="its keys are"):
        read_shape({"config": SMALL, "dtype": "float32"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding window"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads over 3"),
        ({"head_dim": 7}, "head_dim of 7"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, named):
    with pytest.raises(RequestError) as refused:
        parse_config({"model_type": "qwen3", **SMALL, "num_key_value_heads": 4, **changes})
    message = str(refused.value)
    assert named in message
    assert "qwen3" in message
    assert all(kind in message for kind in ROPE_TYPES)


def test_what_a_config_must_have():
    with pytest.raises(RequestError, match="without factor"):
        parse_config({"model_type": "llama", **SMALL, "rope_scaling": {"type": "linear"}})
    with pytest.raises(RequestError, match="hidden_size"):
        parse_config({"model_type": "llama", **SMALL, "hidden_size": 0})


def test_a_sliding_window_that_no_layer_uses_is_none():
    config = {"model_type": "qwen2", **SMALL, "num_key_value_heads": 4}
    assert parse_config(config) == parse_config({**config, "sliding_window": 128, "use_sliding_window": False})
