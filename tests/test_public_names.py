"""Names that others import: where they are, and what they take."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from inspect import Parameter

import pytest

# Positional parameters, then those by keyword that callers pass.
SIGNATURES = {
    "objective:group_advantages": "rewards, *, normalize_std, focal_gamma, std_floor",
    "objective:upper_clip": "num_correct, *, group_size, eps_low, eps_high_max",
    "objective:policy_loss": "log_probs, old_log_probs, *, sequence_ids, advantages, num_correct, "
    "group_size, num_tokens_global, method",
    "logprob:token_log_probs": "hidden, weight, labels, *, row_index, temperature, vocab_start, "
    "vocab_size, tp_group, sequence_parallel, implementation",
    "rewards.math:verify": "response, answer",
    "rewards.code:verify": "response, answer, *, limits",
    "rewards.code:run_tests": "program, tests, *, limits",
    "evaluate:pass_at_k": "num_samples, num_correct, k",
    "evaluate.pass_at_k:pass_at_k": "num_samples, num_correct, k",
    "batching:plan": "lengths, advantages, *, num_minibatches, max_tokens_per_microbatch, "
    "data_parallel_size, num_response_tokens, valid, keep_zero_advantage",
}


@pytest.mark.parametrize("place", SIGNATURES)
def test_a_public_function_takes_what_it_did(place: str) -> None:
    module, name = place.split(":")
    importlib.import_module("gapo_megatron.evaluate.evaluate")  # imports the module pass_at_k
    function = getattr(importlib.import_module(f"gapo_megatron.{module}"), name)
    assert inspect.isfunction(function)
    parameters = inspect.signature(function).parameters.values()
    positional, _, keywords = SIGNATURES[place].partition(", *, ")
    by_kind = [
        [one.name for one in parameters if one.kind is kind]
        for kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    assert by_kind[0] == positional.split(", ")
    assert set(filter(None, keywords.split(", "))) <= set(by_kind[1])


def test_the_methods_are_public() -> None:
    from gapo_megatron.objective import METHODS, Method

    assert isinstance(METHODS["gapo"], Method)


def test_pass_at_k_needs_no_torch() -> None:
    code = (
        "import sys; from gapo_megatron.evaluate import pass_at_k;"
        " print(pass_at_k(2, 1, 1), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "0.5 False\n"
