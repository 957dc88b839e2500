"""Names that others import: where they are, and what they take."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

FUNCTIONS = {
    "gapo_megatron.objective:group_advantages": (),
    "gapo_megatron.objective:upper_clip": (),
    "gapo_megatron.objective:policy_loss": (),
    "gapo_megatron.logprob:token_log_probs": (),
    "gapo_megatron.rewards.math:verify": ("response", "answer"),
    "gapo_megatron.rewards.code:run_tests": ("program", "tests", "limits"),
    "gapo_megatron.evaluate:pass_at_k": ("num_samples", "num_correct", "k"),
    "gapo_megatron.evaluate.pass_at_k:pass_at_k": ("num_samples", "num_correct", "k"),
    "gapo_megatron.batching:plan": (),
}


@pytest.mark.parametrize("place", FUNCTIONS)
def test_a_public_function_is_one(place: str) -> None:
    module, name = place.split(":")
    importlib.import_module("gapo_megatron.evaluate.evaluate")  # whatever was imported before
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    assert [one for one in FUNCTIONS[place] if one not in parameters] == []


def test_pass_at_k_needs_no_torch() -> None:
    code = "import sys; from gapo_megatron.evaluate import pass_at_k; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
