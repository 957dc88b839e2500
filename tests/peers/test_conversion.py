"""A model that was Megatron's and came back, in its users' hands: transformers and vLLM."""

import contextlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from gapo_megatron.models.tables import ARCHITECTURES
from gapo_tools.conversion.directions import Options, hf_to_megatron, megatron_to_hf
from tests.convert_setup import make_config, make_model
from tests.dist import rank_context

# What vLLM computes on a CPU: head_dim is one of its kernels', and a Qwen2's is hidden / heads.
SIZES = {"hidden_size": 192, "head_dim": 64, "max_position_embeddings": 128}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {"head_dim": 32},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": 16},
    # Layers that predict further tokens are left out, and config.json says so.
    "glm4_moe": {"num_nextn_predict_layers": 0},
    "deepseek_v3": {
        **{"num_nextn_predict_layers": 0, "moe_intermediate_size": 64},
        **{"head_dim": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32},
    },
}
# Of one architecture in the first stage, of one with tied embeddings in the second.
MARKS = {("qwen2", False): [], ("qwen2", True): [pytest.mark.system]}
PROMPTS = [[3, 7, 2, 9, 30], [60], list(range(20, 50))]
NUM_TOKENS = 24
# Of the largest logit: closer than that, two tokens may change places in vLLM, which sums in
# another order. Any wrong tensor moves logits by a good part of the largest.
ROUNDING = 1e-4


@dataclass
class Journey:
    source: Path
    exported: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, tied),
            marks=MARKS.get((name, tied), [pytest.mark.system] + [pytest.mark.soak] * tied),
            id=f"{name}{'-tied' * tied}",
        )
        for name in ARCHITECTURES
        for tied in (False, True)
    ],
)
def journey(request, tmp_path_factory) -> Journey:
    """Hugging Face -> Megatron -> Hugging Face."""
    model_type, tied = request.param
    root: Path = tmp_path_factory.mktemp(model_type)
    source, megatron, exported = root / "source", root / "megatron", root / "exported"
    changes = CHANGES.get(model_type, {})
    config = make_config(model_type, tie_word_embeddings=tied, **{**SIZES, **changes})
    model = make_model(config)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(source)
    save_tokenizer(source, config.vocab_size)
    hf_to_megatron(source, megatron, Options(mode="none"))
    megatron_to_hf(megatron, exported, Options(mode="none"), max_shard_bytes=2**20)
    return Journey(source, exported)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    words = WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="w1", chat_template=template
    ).save_pretrained(folder)


@contextlib.contextmanager
def warnings_of(library: str) -> Iterator[list[str]]:
    """What a library logs as a warning, or worse."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(f"{record.name}: {record.getMessage()}")
    logger = logging.getLogger(library)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield seen
    logger.setLevel(level)
    logger.removeHandler(handler)


# --- transformers --------------------------------------------------------------------------------


def load(folder: Path) -> tuple[PreTrainedModel, dict[str, Any], list[str]]:
    """The model, what was odd about its tensors, and what was logged of it."""
    with warnings_of("transformers") as logged:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model.eval(), {what: found for what, found in info.items() if found}, logged


def test_transformers_loads_the_same_model(journey):
    original, _, _ = load(journey.source)
    exported, odd, logged = load(journey.exported)
    assert (odd, logged) == ({}, [])
    assert greedy(exported) == greedy(original)
    expected = original.state_dict()
    for name, tensor in exported.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected


def greedy(model: PreTrainedModel) -> list[list[int]]:
    return [
        model.generate(
            torch.tensor([prompt]), do_sample=False, temperature=None, max_new_tokens=NUM_TOKENS
        )[0].tolist()
        for prompt in PROMPTS
    ]


# --- vLLM ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_process() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: vLLM binds threads and memory for good."""
    with ProcessPoolExecutor(1, mp_context=rank_context()) as pool:
        yield pool


def generate_with_vllm(folder: Path) -> tuple[list[list[int]], list[str]]:
    """Greedy tokens, and what was logged of the weights.

    A tensor that vLLM does not know is an exception; of one that is missing, tokens may be all that
    tells.
    """
    # Here, since the server that forks this process may be older than the test.
    os.environ |= {
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        **{"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
        "VLLM_MLA_DISABLE": "1",  # weights are compared here, not kernels
    }
    from vllm import LLM, SamplingParams

    from gapo_megatron.compat.vllm_cpu import repair_on_cpu

    repair_on_cpu()  # of DeepSeek's, vLLM itself is wrong there
    with warnings_of("vllm") as logged:
        llm = LLM(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            kv_cache_memory_bytes=2**26,
            generation_config="vllm",
        )
    greedily = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, greedily, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    # Elsewhere it warns of the machine: no tcmalloc, no thread binding, and so on.
    of_weights = [line for line in logged if line.startswith("vllm.model_executor")]
    return [list(output.outputs[0].token_ids) for output in outputs], of_weights


@pytest.mark.system
@torch.no_grad()
def test_vllm_says_what_transformers_says_of_the_original(journey, vllm_process):
    tokens, logged = vllm_process.submit(generate_with_vllm, journey.exported).result()
    assert logged == []
    original, _, _ = load(journey.source)
    for prompt, response in zip(PROMPTS, tokens, strict=True):
        assert len(response) == NUM_TOKENS
        logits = original(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert (best - chosen).max() <= ROUNDING * logits.abs().max()
