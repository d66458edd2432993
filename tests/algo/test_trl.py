"""Against TRL, where it has the same: its own code computes loss and gradient from the same numbers.

TRL is no dependency of this project. To run these, in an environment of its own:

    pip install trl -e '.[train,dev]' && pytest tests/algo/test_trl.py

TRL's losses are methods of a trainer that computes log-probabilities itself. They are called with a stand-in for the
trainer that hands them ours, padded. Advantages, which TRL computes in the middle of its rollout, are those of a real
step of a tiny model.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from batches import gradient, packed

from rollart.algo.advantage import dr_grpo, grpo, rloo
from rollart.algo.correction import correction_weights
from rollart.algo.loss import policy_loss
from rollart.config.algorithm import CorrectionSettings, LossSettings

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

LENGTHS = [3, 1, 5, 2]


def padded(batch, values):
    """(sequences, longest), zeros at the end."""
    rows = torch.zeros(batch.sequences, max(LENGTHS), dtype=values.dtype)
    for i in range(batch.sequences):
        mine = values[batch.sequence == i]
        rows[i, : len(mine)] = mine
    return rows


class Accelerator(SimpleNamespace):
    num_processes = 1
    sync_gradients = True
    gather = staticmethod(lambda tensor: tensor)
    reduce = staticmethod(lambda tensor, reduction: tensor)  # noqa: ARG005


def stand_in(batch, **settings):
    """What `GRPOTrainer._compute_loss` reads of its trainer."""
    logprobs, entropy = padded(batch, batch.logprobs), padded(batch, batch.entropy)
    return SimpleNamespace(
        **{
            "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, entropy, None),
            "_metrics": {"train": defaultdict(list)},
            "_entropy_bonus_enabled": False,
            "accelerator": Accelerator(),
            "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            "aux_loss_enabled": False,
            "beta": 0.0,
            "current_gradient_accumulation_steps": 1,
            "importance_sampling_level": "token",
            "model": SimpleNamespace(training=True),
            "off_policy_mask_threshold": None,
            "top_entropy_quantile": 1.0,
            "use_adaptive_entropy": False,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
        }
        | settings
    )


def theirs(batch, weights=None, **settings):
    mask = padded(batch, torch.ones_like(batch.behaviour))
    inputs = {
        "prompt_ids": torch.zeros(batch.sequences, 1),
        "prompt_mask": torch.ones(batch.sequences, 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": padded(batch, batch.advantages),
        "old_per_token_logps": padded(batch, batch.proximal),
        "ref_per_token_logps": padded(batch, batch.reference),
        "num_items_in_batch": mask.sum(),
    }
    if weights is not None:
        inputs["importance_sampling_ratio"] = padded(batch, weights)
        settings |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
    return GRPOTrainer._compute_loss(stand_in(batch, **settings), None, inputs)


def assert_same(settings, batch, expected):
    loss, _ = policy_loss(settings, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient(loss, batch), gradient(expected, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss_type", "aggregation"), [("dapo", "token_mean"), ("grpo", "sequence_mean")])
def test_ppo(loss_type, aggregation, seed):
    batch = packed(LENGTHS, seed=seed)
    settings = LossSettings(clip_low=0.1, clip_high=0.28, aggregation=aggregation)
    assert_same(settings, batch, theirs(batch, loss_type=loss_type, epsilon_low=0.1, epsilon_high=0.28))


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip(seed):
    batch = packed(LENGTHS, seed=seed, spread=2.0)
    args = SimpleNamespace(delta=1.5, use_bias_correction_kl=False, steps_per_generation=1)
    expected = theirs(batch, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, args=args)
    assert_same(LossSettings(dual_clip=1.5), batch, expected)


@pytest.mark.parametrize("seed", range(3))
def test_kl(seed):
    batch = packed(LENGTHS, seed=seed)
    settings = LossSettings(clip_low=0.2, clip_high=0.2, kl_weight=0.04)
    assert_same(settings, batch, theirs(batch, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, beta=0.04))


def test_entropy_bonus():
    batch = packed(LENGTHS)
    options = {"_entropy_bonus_enabled": True, "entropy_coef": 0.03}
    batch.entropy.requires_grad_()
    expected = theirs(batch, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, **options)
    assert_same(LossSettings(entropy_weight=0.03), batch, expected)


@pytest.mark.parametrize("seed", range(3))
def test_gspo(seed):
    batch = packed(LENGTHS, seed=seed, spread=0.1)
    settings = LossSettings(kind="gspo", clip_low=0.03, clip_high=0.04)
    options = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}
    assert_same(settings, batch, theirs(batch, loss_type="grpo", **options))


@pytest.mark.parametrize("seed", range(3))
def test_cispo(seed):
    """TRL's bound is that of the weight itself."""
    batch = packed(LENGTHS, seed=seed)
    settings = LossSettings(kind="cispo", clip_high=0.2)
    assert_same(settings, batch, theirs(batch, loss_type="cispo", epsilon_high=1.2))


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrected(correction, level):
    batch = packed(LENGTHS)
    given = CorrectionSettings(kind=correction, level=level, cap=1.3)
    weights, _ = correction_weights(given, batch.proximal, batch.behaviour, batch.sequence, batch.sequences)
    expected = theirs(batch, weights, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2)
    assert_same(LossSettings(correction=given), batch, expected)


# --- advantages, of a real step

WORDS = ["<pad>", "<eos>", "a", "b", "c", "d"]
PROMPTS = ["a", "b"]
MEMBERS = 4


def recorded(trainer_class, config_class, folder, **options):
    """Rewards and advantages of the groups of TRL's first batch."""
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="d"))
    words.pre_tokenizer = WhitespaceSplit()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), num_key_value_heads=1, pad_token_id=0, eos_token_id=1, **sizes)
    )
    given = []

    def reward(completions, **_):
        given.extend(float(len(text.split()) + 3 * text.count("a")) for text in completions)
        return given[-len(completions) :]

    trainer = trainer_class(
        model=model,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        args=config_class(
            output_dir=str(folder),
            per_device_train_batch_size=MEMBERS * len(PROMPTS),
            num_generations=MEMBERS,
            max_completion_length=6,
            max_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            **options,
        ),
    )
    trainer.train()
    advantages = list(trainer._logs["advantages"])
    assert len(set(given)) > 2
    assert len(advantages) == len(given) == MEMBERS * len(PROMPTS)
    return [[row[i : i + MEMBERS] for i in range(0, len(row), MEMBERS)] for row in (given, advantages)]


@pytest.mark.parametrize(("scaling", "ours"), [("group", grpo), ("none", dr_grpo)])
def test_grpo_and_dr_grpo(scaling, ours, tmp_path):
    rewards, advantages = recorded(GRPOTrainer, GRPOConfig, tmp_path, scale_rewards=scaling)
    for group, expected in zip(rewards, advantages, strict=True):
        # TRL adds 1e-4 to the deviation, and computes in float32.
        assert ours(group) == pytest.approx(expected, rel=5e-4, abs=1e-5)


def test_rloo(tmp_path):
    rewards, advantages = recorded(RLOOTrainer, RLOOConfig, tmp_path, beta=0.0)
    for group, expected in zip(rewards, advantages, strict=True):
        assert rloo(group) == pytest.approx(expected, rel=1e-5, abs=1e-5)
