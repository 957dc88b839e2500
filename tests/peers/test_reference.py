"""Operator and objective against the plain reference, weight by weight in Hugging Face names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.logprob import token_log_probs
from gapo_megatron.objective import METHODS, group_advantages, group_counts, policy_loss
from tests.peers.reference import Update, gapo_update, in_float64, response_log_probs

GROUP_SIZE = 4
# c = 0, 1, 3, 4: groups without advantage, scarce and abundant correct rollouts.
REWARDS = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
# D of every sequence (x 1e-3), around the clips: -3 below; above +5 at c = 1 and +3.67 at c = 3.
# So 4.5 is inside at c = 1 and outside at c = 3; 3.3 is inside, unlike under a symmetric clip.
LOG_RATIOS = [
    1e-3 * d for d in (9, -9, 0, 1, -6.0, 4.5, 6.0, -2.0, 3.3, 4.5, -4.0, -9.0, 9, -9, 0, 1)
]
CLIPPED = [4, 9, 10]


def tiny_model(*, tied: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=53,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=tied,
        )
    )


def sequences() -> tuple[list[list[int]], list[list[int]]]:
    random = torch.Generator().manual_seed(1)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=random))
        return torch.randint(53, (length,), generator=random).tolist()

    prompts = [tokens(1, 8) for _ in range(len(REWARDS) // GROUP_SIZE)]
    return [p for p in prompts for _ in range(GROUP_SIZE)], [tokens(1, 20) for _ in REWARDS]


def our_update(
    model: Qwen2ForCausalLM, old_log_probs: list[Tensor], temperature: float
) -> tuple[float, dict[str, Tensor]]:
    """The same update through `token_log_probs` and `policy_loss`, on the model's hidden states."""
    prompts, responses = sequences()
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    hidden = [
        model.model(input_ids=torch.tensor([row])).last_hidden_state[0, len(prompt) - 1 : -1]
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    log_probs = token_log_probs(
        torch.cat(hidden),
        model.lm_head.weight,
        torch.tensor([token for response in responses for token in response]),
        temperature=temperature,
    )
    assert isinstance(log_probs, Tensor)
    rewards = torch.tensor(REWARDS).view(-1, GROUP_SIZE)
    result = policy_loss(
        log_probs,
        torch.cat(old_log_probs),
        sequence_ids=torch.cat([torch.full((len(r),), i) for i, r in enumerate(responses)]),
        advantages=group_advantages(rewards).flatten(),
        num_correct=group_counts(rewards)[0].repeat_interleave(GROUP_SIZE),
        group_size=GROUP_SIZE,
        num_tokens_global=sum(map(len, responses)),
        method=METHODS["gapo"],
    )
    result.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return float(result.loss.detach()), gradients


def reference_update(
    model: Qwen2ForCausalLM, old_log_probs: list[Tensor] | None, temperature: float = 1.0
) -> Update:
    prompts, responses = sequences()
    return gapo_update(
        model,
        prompts=prompts,
        responses=responses,
        rewards=REWARDS,
        group_size=GROUP_SIZE,
        old_log_probs=old_log_probs,
        temperature=temperature,
    )


def policy_nearby(model: Qwen2ForCausalLM, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of a policy from which `model` differs by LOG_RATIOS, and by noise per token."""
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        current = response_log_probs(in_float64(model), *sequences(), temperature)
    old = []
    for new, log_ratio in zip(current, LOG_RATIOS, strict=True):
        noise = 0.05 * torch.randn(new.shape, generator=random, dtype=torch.float64)
        old.append(new - log_ratio - (noise - noise.mean()))
    return old


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_loss_and_every_gradient_agree(dtype: torch.dtype, tied: bool, temperature: float) -> None:
    model = tiny_model(tied=tied)
    old = policy_nearby(model, temperature)
    expected = reference_update(model, old, temperature)
    assert [i for i, clipped in enumerate(expected.clipped) if clipped] == CLIPPED
    ours = in_float64(model) if dtype == torch.float64 else model
    loss, gradients = our_update(ours, old, temperature)
    # float64: rounding of a few thousand additions. float32: the model's own rounding, about 1e-6
    # per log-prob; the loss is a mean of A * s with |A| < 1.
    loss_bound, gradient_bound = (1e-14, 1e-12) if dtype == torch.float64 else (1e-6, 1e-5)
    assert loss == pytest.approx(expected.loss, abs=loss_bound)
    assert gradients.keys() == expected.gradients.keys()
    for name, right in expected.gradients.items():
        error = (gradients[name].double() - right).norm()
        assert error <= gradient_bound * max(float(right.norm()), 1e-3 * expected.grad_norm), name


def test_the_reference_is_the_derivative_of_its_own_loss() -> None:
    model = in_float64(tiny_model(tied=True))
    old = policy_nearby(model)
    update = reference_update(model, old)
    random = torch.Generator().manual_seed(2)
    direction = {
        name: torch.randn(g.shape, generator=random, dtype=torch.float64)
        for name, g in update.gradients.items()
    }
    losses = []
    step = 1e-6  # error of the difference: step^2 = 1e-12 of a third derivative, plus 1e-16 / step
    for sign in (1, -1):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight += sign * step * direction[name]
        losses.append(reference_update(model, old).loss)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight -= sign * step * direction[name]
    slope = sum(float((update.gradients[n] * direction[n]).sum()) for n in direction)
    # A layer that fell back to float32 would leave noise of 1e-7 / step = 0.1.
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_the_reference_at_its_own_policy_is_the_mean_advantage() -> None:
    update = reference_update(tiny_model(tied=False), None)
    _, responses = sequences()
    assert update.ratios == [1.0] * len(REWARDS)
    assert not any(update.clipped)
    assert update.advantages[4:12] == [-0.25, 0.75, -0.25, -0.25, 0.25, 0.25, -0.75, 0.25]
    lengths = [len(response) for response in responses]
    mean = sum(n * a for n, a in zip(lengths, update.advantages, strict=True)) / sum(lengths)
    assert update.loss == pytest.approx(-mean, abs=1e-15)
