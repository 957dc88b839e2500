"""Adapter folders of every architecture, loaded by peft itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron import checkpoint
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.learn.score import log_probs as score
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import ParallelGroups
from gapo_megatron.types import Factors
from gapo_tools.conversion.adapter import convert_adapter
from gapo_tools.conversion.adapter_checkpoint import AdapterCheckpoint
from gapo_tools.conversion.directions import Options
from tests.attempt_setup import make_attempt
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.conversion_setup import ARCHITECTURES, VOCAB_SIZE, hf_config, save_model
from tests.distributed.lora_setup import ALPHA, EVERY_TARGET, RANK, randomise
from tests.distributed.policy_setup import (
    load_policy,
    make_batch,
    make_config,
    reference_log_probs,
)
from tests.distributed.training_setup import MODELS
from tests.messages import mentions

BATCH = make_batch(vocab_size=VOCAB_SIZE)
OF_EXPERTS = {"fc1", "fc2", "experts"}
"""Targets that an adapter folder of a model with experts cannot hold."""


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def log_probs(model: Any) -> Tensor:
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        return model.eval()(ids).logits.log_softmax(dim=-1)


def save_run(run: Path, base: Path, targets: list[str], groups: ParallelGroups) -> Tensor:
    """A checkpoint of random factors, and log-probs of the policy."""
    section = {"kind": "lora", "rank": RANK, "alpha": ALPHA, "targets": targets}
    config = make_config(base, adapter=section)
    policy = load_policy(config, groups)
    randomise(policy)
    attempt = make_attempt(run)
    checkpoint.save(run, make_state(1), policy=policy, config=config, attempt=attempt)
    return torch.cat(score(policy, [policy.pack(BATCH, range(len(BATCH)))]))


@pytest.mark.parametrize("model", [*ARCHITECTURES, "moonlight"])
def test_peft_the_merged_model_and_the_policy_compute_the_same(
    groups: ParallelGroups, tmp_path: Path, model: str
) -> None:
    """With every target of the model that a folder can hold; others are refused by name."""
    name, changes = MODELS[model]
    base, merged, peft = (tmp_path / one for one in ("base", "merged", "peft"))
    save_model(base, name, **changes)
    rules = rules_for(hf_config(name, **changes))
    every = {one.target for one in factors_of(rules, targets=EVERY_TARGET, rank=RANK)}
    has_experts = any(rule.num_experts for rule in rules)
    refused = every & OF_EXPERTS if has_experts else set()
    for target in sorted(refused):
        run = tmp_path / target
        save_run(run, base, ["qkv", target], groups)
        with pytest.raises(ConfigError, match=mentions("adapter.targets", target, "merged")):
            convert_adapter(run, peft, Options(), kind="peft")
        assert not peft.exists()
    run = tmp_path / "run"
    of_policy = save_run(run, base, sorted(every - refused), groups)
    convert_adapter(run, peft, Options(), kind="peft")
    convert_adapter(run, merged, Options(), kind="merged")
    # fp32 rounding beside log-probs of down to -30; without factors, whole units.
    of_merged = torch.cat(reference_log_probs(loaded(merged).eval(), BATCH)).detach()
    assert (of_policy - of_merged).abs().max() < 1e-3
    expected = log_probs(loaded(merged))
    assert (expected - log_probs(loaded(base))).abs().max() > 1
    found = log_probs(PeftModel.from_pretrained(loaded(base), peft))
    # In fp32 a product more and a rounding less; measured: 3e-5.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_an_adapter_folder_names_its_base_wherever_it_is_read(
    groups: ParallelGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in the run's config may be relative; peft takes others for names of a hub."""
    base, run, peft = (tmp_path / one for one in ("base", "run", "peft"))
    save_model(base, "qwen2")
    save_run(run, base, ["qkv"], groups)
    monkeypatch.chdir(tmp_path)
    convert_adapter(run, peft, Options(), kind="peft", base_dir=Path("base"))
    monkeypatch.chdir("/")
    AutoPeftModelForCausalLM.from_pretrained(peft)


def test_factors_of_no_weight_of_the_model_are_not_left_out(
    groups: ParallelGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, run, merged = (tmp_path / one for one in ("base", "run", "merged"))
    save_model(base, "qwen2")
    save_run(run, base, ["qkv"], groups)
    real = AdapterCheckpoint.factors

    def and_one_more(self: AdapterCheckpoint) -> Iterator[Factors]:
        yield from real(self)
        yield "model.ghost", torch.ones(1, 2), torch.ones(2, 1)

    monkeypatch.setattr(AdapterCheckpoint, "factors", and_one_more)
    with pytest.raises(ConversionError, match=mentions("model.ghost.weight")):
        convert_adapter(run, merged, Options(), kind="merged")
    assert not merged.exists()
