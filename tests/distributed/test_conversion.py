"""Architectures in layouts: logits as in transformers, and bitwise equal weights.

The full circle: a Hugging Face folder; the Megatron folder converted from it without Megatron-core;
the policy loaded from that by Megatron-core in a layout; the checkpoint that this policy saves; and
the Hugging Face tensors converted from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron.config import ParallelConfig
from gapo_megatron.formats.torch_dist import MegatronFolder
from gapo_megatron.formats.weights import in_model_order
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import ParallelGroups, Policy, destroy, initialize
from gapo_megatron.policy.model import read_hf_config
from gapo_tools.conversion.full_logits import logits
from tests.convert_setup import one_by_one
from tests.dist import SOAK, run_distributed
from tests.distributed.checkpoint_setup import write_state
from tests.distributed.conversion_setup import (
    ARCHITECTURES,
    VOCAB_SIZE,
    convert,
    hf_config,
    save_model,
)
from tests.distributed.policy_setup import (
    EP,
    PP,
    SP,
    TP,
    make_batch,
    make_config,
    pack_all,
    read_weights,
)

WORLD_SIZE = 4
EXPERTS = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3")
# What is left of the four ranks is data parallel.
LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor 2": {TP: 2},
    "tensor 4": {TP: 4, SP: True},
    "pipeline 2": {PP: 2},
    "pipeline 4": {PP: 4},
    "tensor 2, pipeline 2": {TP: 2, PP: 2, SP: True},
    "expert 2": {EP: 2},
    "expert 4": {EP: 4},
    "expert 1, tensor 2": {EP: 1, TP: 2, SP: True},
    "expert 2, tensor 2": {EP: 2, TP: 2, SP: True},
    "expert 2, pipeline 2": {EP: 2, PP: 2},
    "expert 4, tensor 2": {EP: 4, TP: 2, SP: True},
    "expert 4, tensor 4": {EP: 4, TP: 4, SP: True},
    "expert 2, tensor 2, pipeline 2": {EP: 2, TP: 2, PP: 2, SP: True},
}
# Four tensor parallel ranks need four groups of heads. The other kind of output layer, too.
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}
NEVER_TIED = ("gpt_oss", "glm4_moe", "deepseek_v3")
# Queries from hidden states, keys and values for every head, no scaling.
WIDE_LATENT = {
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": None},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
BATCH = make_batch(3, vocab_size=VOCAB_SIZE)
NUM_TOKENS = int(BATCH.num_fed_tokens.sum())


def models_of(layout: str) -> list[str]:
    """The models that run in a layout."""
    parallel = LAYOUTS[layout]
    names = [
        name
        for name in ARCHITECTURES
        if (EP in parallel or TP not in parallel if name in EXPERTS else EP not in parallel)
    ]
    wide = [f"{name}-wide" for name in names]
    if layout == "data":
        return names + wide
    return wide if parallel.get(TP) == 4 else names


CASES = [(model, layout) for layout in LAYOUTS for model in models_of(layout)]
# Every kind of parallelism, each with another architecture.
SOME = [
    ("qwen2", "data"),
    ("llama-wide", "tensor 4"),
    ("qwen3", "tensor 2, pipeline 2"),
    ("mistral", "pipeline 4"),
    ("qwen3_moe", "expert 1, tensor 2"),
    ("qwen3_moe", "expert 2, tensor 2"),
    ("glm4_moe", "expert 2, tensor 2, pipeline 2"),
    ("deepseek_v3", "expert 2, tensor 2, pipeline 2"),
    ("qwen2", "tensor 2, pipeline 2"),
]
Found = dict[tuple[str, str], Tensor | None]
"""Logits by (model, layout); None except on the last pipeline stage."""


def run_all(root: Path, cases: list[tuple[str, str]]) -> Found:
    """Load, compute, and save below `root`."""
    found: Found = {}
    before: dict[str, list[Path]] = {}
    for layout, parallel in LAYOUTS.items():
        models = [model for model, where in cases if where == layout]
        if not models:
            continue
        groups = initialize(ParallelConfig(**parallel))
        for model in models:
            saved = root / f"{model}-{layout}"
            folders = [root / f"{model}-megatron", *before.get(model, [])]
            found[model, layout] = run(root / model, folders, saved, groups, parallel)
            before[model] = [saved]
        destroy()
    return found


def run(
    hf_dir: Path,
    megatron_dirs: list[Path],
    saved: Path,
    groups: ParallelGroups,
    parallel: dict[str, int],
) -> Tensor | None:
    """Check that all folders load the same weights; return logits; write `saved`."""
    policy = Policy.build(make_config(hf_dir, parallel=parallel), groups, "cpu")
    parameters = [parameter.detach() for _, parameter in policy.stages[0].named_weights()]
    policy.load_hf_weights(read_weights(hf_dir))
    expected = [parameter.clone() for parameter in parameters]
    for folder in megatron_dirs:
        for parameter in parameters:
            parameter.fill_(torch.nan)
        policy.load_megatron_weights(folder)
        for parameter, value in zip(parameters, expected, strict=True):
            assert torch.equal(parameter, value), (folder, saved.name)

    (microbatch,) = pack_all(BATCH, [range(len(BATCH))], align=policy.sequence_multiple)
    values = logits(policy.stages[0], groups, microbatch)

    if groups.rank == 0:
        saved.mkdir()
    torch.distributed.barrier()
    write_state(policy.stages[0].sharded_state_dict(), saved, groups)
    torch.distributed.barrier()
    whole = dict(policy.iterate_hf_weights())
    for key, value in read_weights(hf_dir):
        assert torch.equal(whole.pop(key), value), (saved.name, key)
    assert not whole
    return None if values is None else values[:NUM_TOKENS]


@dataclass(frozen=True)
class Ran:
    """Results of four ranks."""

    cases: list[tuple[str, str]]
    root: Path
    found: list[Found]


@pytest.fixture(scope="module", params=["some", pytest.param("every", marks=SOAK)])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    cases = SOME if request.param == "some" else CASES
    root: Path = tmp_path_factory.mktemp("conversion")
    for model in {model for model, _ in cases}:
        name = model.removesuffix("-wide")
        wide = WIDE_LATENT if name == "deepseek_v3" else WIDE
        changed = {} if model == name else {**wide, "tie_word_embeddings": other_output(name)}
        save_model(root / model, name, **changed)
        convert(root / model, root / f"{model}-megatron")
    # One start for all cases, because ranks take far longer to start than to compute.
    return Ran(cases, root, run_distributed(run_all, WORLD_SIZE, root, cases))


def other_output(name: str) -> bool:
    """Whether the output layer is tied where it usually is not, and the reverse."""
    return not hf_config(name).tie_word_embeddings and name not in NEVER_TIED


@torch.no_grad()
def transformers_logits(folder: Path) -> Tensor:
    """One sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sequences = [
        np.concatenate([BATCH.prompt_ids[i], BATCH.response_ids[i][:-1]]) for i in BATCH.rows_here
    ]
    return torch.cat([model(torch.from_numpy(ids).long()[None]).logits[0] for ids in sequences])


def test_logits_are_those_of_transformers(ran: Ran) -> None:
    expected = {model: transformers_logits(ran.root / model) for model, _ in ran.cases}
    for model, layout in ran.cases:
        scale = float(expected[model].abs().max())
        assert scale > 1
        found = [rank[model, layout] for rank in ran.found]
        assert sum(x is not None for x in found) == WORLD_SIZE // LAYOUTS[layout].get(PP, 1)
        for values in found:
            if values is not None:
                # fp32 sums in another order; 1e-6 measured.
                difference = float((values - expected[model]).abs().max())
                assert difference <= 1e-5 * scale, (model, layout, difference / scale)


def test_what_every_layout_saves_is_the_same_hugging_face_folder(ran: Ran) -> None:
    for model, layout in ran.cases:
        expected = one_by_one(load_file(ran.root / model / "model.safetensors"))
        rules = rules_for(read_hf_config(str(ran.root / model)))
        folder = MegatronFolder(ran.root / f"{model}-{layout}", rules)
        for rule, place in in_model_order(rules):
            tensors = rule.split(folder.read(rule, place), place)
            for key, tensor in zip(rule.hf_names(place), tensors, strict=True):
                assert torch.equal(tensor, expected.pop(key)), (model, layout, key)
        assert not expected
