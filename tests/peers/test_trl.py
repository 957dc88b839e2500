"""Our losses against TRL's own code, on one fixed batch through one tiny model.

TRL works on padded rows [B, T], in the dtype of its inputs; two things differ by design:

- Aggregation goes by `loss_type`. With a sequence ratio, `grpo` is the mean over sequences (our
  `sequence_mean`), and `dapo` gives every response token its sequence's loss and divides by the
  tokens of the batch (our `token_mean`, as in the paper). TRL warns of the second, and GSPO's own
  paper uses the first: the same losses l_i, weighted by response length or not.
- CISPO's `epsilon_high` is the bound itself in TRL, and its distance from 1 here.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: nothing to compare with")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from gapo_megatron.objective import METHODS, policy_loss

VOCAB, GROUP_SIZE, NUM_SEQUENCES, MAX_RESPONSE_TOKENS = 32, 8, 16, 12
# Both losses start from TRL's float32 log-probs; with the rest of the batch in float64 TRL computes
# its loss in float64 too, and only the order of a few hundred additions differs.
LOSS_TOLERANCE = 1e-12
# Gradients enter the float32 model through log-probs rounded to float32 (6e-8), and add up there.
GRADIENT_TOLERANCE = 1e-6


def make_tokenizer():
    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


def make_trainer(tmp_path, kind=(GRPOTrainer, GRPOConfig), **settings):
    make, make_config = kind
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=0.0,
        )
    )
    config = make_config(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        beta=0.0,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=NUM_SEQUENCES,
        max_completion_length=MAX_RESPONSE_TOKENS,
        **settings,
    )
    trainer = make(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3"] * NUM_SEQUENCES}),
        processing_class=make_tokenizer(),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # what `training_step` would set
    return trainer


def make_inputs(trainer, spread):
    """A padded batch of two groups, c = 2 and c = 6; the old policy is `spread` away."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, VOCAB - 2, (NUM_SEQUENCES, 4), generator=generator)
    completion = torch.randint(
        0, VOCAB - 2, (NUM_SEQUENCES, MAX_RESPONSE_TOKENS), generator=generator
    )
    lengths = torch.randint(1, MAX_RESPONSE_TOKENS + 1, (NUM_SEQUENCES,), generator=generator)
    mask = (torch.arange(MAX_RESPONSE_TOKENS) < lengths[:, None]).long()
    num_correct = torch.tensor([2] * GROUP_SIZE + [6] * GROUP_SIZE)
    rewards = (torch.arange(NUM_SEQUENCES) % GROUP_SIZE < num_correct).double()
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": rewards - num_correct.double() / GROUP_SIZE,
        "num_items_in_batch": mask.sum(),
    }
    # A shift per sequence moves D over both edges of the clip; one per token, the token ratios.
    shift = spread * torch.randn(NUM_SEQUENCES, 1, generator=generator)
    shift = shift + spread * torch.randn(mask.shape, generator=generator)
    with torch.no_grad():
        inputs["old_per_token_logps"] = completion_log_probs(trainer, inputs) - shift.double()
    return inputs, num_correct


def completion_log_probs(trainer, inputs):
    """[B, T] log-probs of the completion tokens, by TRL: losses are compared, not models."""
    log_probs, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        MAX_RESPONSE_TOKENS,
    )
    return log_probs


def our_loss(trainer, inputs, num_correct, method):
    mask = inputs["completion_mask"].bool()
    return policy_loss(
        completion_log_probs(trainer, inputs)[mask],
        inputs["old_per_token_logps"][mask],
        sequence_ids=torch.arange(NUM_SEQUENCES).repeat_interleave(mask.sum(dim=1)),
        advantages=inputs["advantages"],
        num_correct=num_correct,
        group_size=GROUP_SIZE,
        num_tokens_global=int(mask.sum()),
        num_sequences_global=NUM_SEQUENCES,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        method=method,
    )


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


GSPO = METHODS["gspo"]
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 3e-3}
# TRL keeps its two temperatures as float32, where 1.05 is 2e-8 off.
SAPO = dataclasses.replace(METHODS["sapo"], eps_low=1 / float(torch.tensor(1.05)))
TOKEN = {"importance_sampling_level": "token", "epsilon": 0.2}


@pytest.mark.parametrize(
    ("settings", "method", "spread"),
    [
        (SEQUENCE | {"loss_type": "dapo"}, GSPO, 8e-3),
        (
            SEQUENCE | {"loss_type": "grpo"},
            dataclasses.replace(GSPO, aggregation="sequence_mean"),
            8e-3,
        ),
        (
            SEQUENCE | {"loss_type": "dr_grpo"},
            dataclasses.replace(GSPO, aggregation="constant"),
            8e-3,
        ),
        (SEQUENCE | {"loss_type": "dapo", "epsilon_high": 5e-3}, METHODS["gspo_asym"], 8e-3),
        (TOKEN | {"loss_type": "grpo", "epsilon_high": 0.2}, METHODS["grpo"], 0.2),
        (TOKEN | {"loss_type": "dapo", "epsilon_high": 0.28}, METHODS["dapo"], 0.2),
        (TOKEN | {"loss_type": "dr_grpo", "epsilon_high": 0.28}, METHODS["dr_grpo"], 0.2),
        (TOKEN | {"loss_type": "cispo", "epsilon_high": 1.28}, METHODS["cispo"], 0.2),
        ({"importance_sampling_level": "token", "loss_type": "sapo"}, SAPO, 0.8),
        (
            SEQUENCE | {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
            METHODS["luspo"],
            8e-3,
        ),
        (
            {"kind": (GMPOTrainer, GMPOConfig), "epsilon": 0.4},
            METHODS["gmpo"],
            0.4,
        ),
        (
            TOKEN | {"loss_type": "grpo", "off_policy_mask_threshold": 1e-4, "epsilon_high": 0.2},
            METHODS["opsm"],
            0.2,
        ),
        (
            TOKEN | {"loss_type": "cispo", "off_policy_mask_threshold": 0.1, "epsilon_high": 1.28},
            dataclasses.replace(METHODS["cispo"], name="cispo, masked", off_policy_mask=0.1),
            0.2,
        ),
    ],
    ids=lambda value: (
        value.get("loss_type", "") if isinstance(value, dict) else getattr(value, "name", "")
    ),
)
def test_loss_and_gradient_equal_those_of_trl(tmp_path, settings, method, spread):
    trainer = make_trainer(tmp_path, **settings)
    inputs, num_correct = make_inputs(trainer, spread)
    theirs = trainer._compute_loss(trainer.model, inputs)
    expected = gradients(trainer.model, theirs)
    ours = our_loss(trainer, inputs, num_correct, method)
    got = gradients(trainer.model, ours.loss)

    share = float(ours.clipped.double().mean())
    assert 0.1 < share < 0.9, f"a test of clipping needs some of it: {share}"
    assert float(ours.loss.detach()) == pytest.approx(float(theirs.detach()), abs=LOSS_TOLERANCE)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            got[name], gradient, rtol=0, atol=GRADIENT_TOLERANCE * largest, msg=name
        )
