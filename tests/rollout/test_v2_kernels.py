"""Kernels of vLLM's model runner V2, which GPUs run and CPUs do not: sampling and log-probs.

Triton interprets them on CPU tensors, in a process of its own (see `tests/logprob/
test_logprob_triton.py`), in which vLLM finds a Triton for CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.waiting import HANG_S

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=object())  # vLLM only counts them
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    from vllm.v1.worker.gpu.sample.prompt_logprob import (
        compute_prompt_logprobs_with_chunking,
        get_prompt_logprobs_token_ids,
    )
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
# Several blocks of 1024 columns, the last not whole.
ROWS, VOCAB = 6, 2500
# Of the two last bits of logits up to 20.
TOLERANCE = 5e-6


@pytest.mark.system
@pytest.mark.skipif(INTERPRETED, reason="this is it")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        timeout=HANG_S,
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


def logits_of(rows: int, columns: int) -> Tensor:
    return 5 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def chosen(log_probs: Tensor, ids: Tensor) -> Tensor:
    return log_probs.gather(1, ids[:, None])[:, 0]


@interpreted
def test_log_probs_of_sampled_tokens() -> None:
    logits, ids = logits_of(ROWS, VOCAB), torch.arange(ROWS) * 400
    found = compute_topk_scores(logits, 0, ids)
    assert found.logprob_token_ids.tolist() == ids[:, None].tolist()
    expected = chosen(logits.double().log_softmax(1), ids)
    assert (found.logprobs[:, 0] - expected).abs().max() < TOLERANCE
    more = compute_topk_scores(logits, 20, ids)
    assert more.logprobs[:, :1].equal(found.logprobs)
    assert more.logprob_token_ids[:, 1:].equal(logits.topk(20).indices)


@interpreted
def test_log_probs_of_prompts() -> None:
    """Of two requests, the second of which has been computed in part; each token by the last."""
    tokens = torch.arange(40).reshape(2, 20).to(torch.int32) * 50
    computed, lengths = torch.tensor([0, 7], dtype=torch.int32), (12, 5)
    starts = torch.tensor([0, 12, 17], dtype=torch.int32)
    ids = get_prompt_logprobs_token_ids(17, starts, torch.tensor([0, 1]), computed, tokens)
    rows = [
        tokens[i, begin + 1 : begin + 1 + length]
        for i, (begin, length) in enumerate(zip(computed.tolist(), lengths, strict=True))
    ]
    assert ids.tolist() == torch.cat(rows).tolist()
    hidden, head = torch.randn(17, 8), torch.randn(8, VOCAB)
    found = compute_prompt_logprobs_with_chunking(ids, hidden, lambda rows: rows @ head, 0)
    expected = chosen((hidden.double() @ head.double()).log_softmax(1), ids)
    assert (found[1][:, 0] - expected).abs().max() < TOLERANCE


COLUMNS, DRAWS = 5, 250


def deviation(sampled: Tensor, logits: Tensor) -> float:
    """The largest of a frequency from its probability, in standard deviations."""
    probs = logits.double().softmax(0)
    found = torch.bincount(sampled, minlength=len(probs)) / len(sampled)
    return float(((found - probs) / (probs * (1 - probs) / len(sampled)).sqrt()).abs().max())


@interpreted
def test_samples_follow_the_temperature_and_depend_on_seed_and_position_alone() -> None:
    row = logits_of(1, COLUMNS)[0] / 8
    logits, each = row.repeat(DRAWS, 1), torch.arange(DRAWS)
    temperature, seeds = torch.full((DRAWS,), 0.5), each * 7919
    apply_temperature(logits, each, temperature)
    torch.testing.assert_close(logits, (row / 0.5).repeat(DRAWS, 1))

    def sample(rows: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = gumbel_sample(
            logits[rows], rows, temperature, seeds, positions, False, is_drafting=False
        )
        return found

    sampled = sample(each, torch.full((DRAWS,), 3))
    assert deviation(sampled, row / 0.5) < 4 < deviation(sampled, row)
    backwards = each.flip(0)[:50]
    assert sample(backwards, torch.full((50,), 3)).equal(sampled[backwards])
    assert not sample(backwards, torch.full((50,), 4)).equal(sampled[backwards])


@interpreted
@pytest.mark.parametrize("draft", [0, 3])
def test_drafts_leave_the_distribution_as_it_is(draft: int) -> None:
    """A proposed token without probabilities of its own, as n-grams propose."""
    row = logits_of(1, COLUMNS)[0] / 8
    each = torch.arange(DRAWS)
    sampled, num_sampled = rejection_sample(
        row.repeat(2 * DRAWS, 1),
        None,
        torch.full((2 * DRAWS,), draft),
        torch.arange(DRAWS + 1) * 2,
        torch.tensor([3, 4]).repeat(DRAWS),
        each,
        each.repeat_interleave(2),
        torch.tensor([0, 1]).repeat(DRAWS),
        torch.ones(DRAWS),
        each * 7919,
        1,
    )
    first = sampled[:, 0].long()
    assert deviation(first, row) < 4
    assert ((num_sampled == 2) == (first == draft)).all()
    assert deviation(sampled[num_sampled == 2, 1].long(), row) < 4
