"""From log-probs of tokens to the log-ratio of a sequence, as `objective` takes its mean."""

import pytest
import torch

from gapo_megatron.logprob import token_log_probs
from gapo_megatron.objective.segments import segment_mean
from tests.logprob_setup import problem, reference


def test_the_log_ratio_of_a_sequence_is_as_exact_as_its_clip_is_narrow() -> None:
    hidden, weight, labels = problem(900, 3000, kind="peaked", dtype=torch.bfloat16)
    sequence_ids = torch.tensor([0] * 300 + [2] * 599 + [3])  # sequence 1 has no tokens
    counts = torch.tensor([300, 0, 599, 1])
    moved = (hidden.float() + 0.01).bfloat16()
    log_probs = token_log_probs(hidden, weight, labels)
    old = token_log_probs(moved, weight, labels)
    assert isinstance(log_probs, torch.Tensor) and isinstance(old, torch.Tensor)
    means = segment_mean(log_probs.double() - old.double(), sequence_ids, 4, counts)
    difference = reference(hidden, weight, labels)[0] - reference(moved, weight, labels)[0]
    expected = [difference[:300].mean(), 0.0, difference[300:899].mean(), difference[899]]
    # The bound the clip widths need (1e-5): errors of a token average out over a sequence.
    assert means.tolist()[:3] == pytest.approx([float(d) for d in expected[:3]], abs=1e-5)
    assert float(means[3]) == pytest.approx(float(expected[3]), abs=5e-5)  # a single token
