"""vLLM's arguments, and checks before an engine is built."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LlamaConfig,
    Qwen3MoeConfig,
)

from gapo_megatron.compat import vllm as vllm_internals
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.cpu_engine import CPU_HEAD_DIMS, is_cpu_build
from gapo_megatron.models.quantization import quantization_of
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.rollout.vllm.arguments import check_engine, engine_args
from gapo_megatron.rollout.vllm.weights import verify_bound
from gapo_tools import evaluate
from tests.configs import config_of
from tests.convert_setup import pack_linears
from tests.distributed.conversion_setup import hf_config, save_model
from tests.messages import mentions
from tests.rollout_setup import CPU, EOS, SIZES, make_args, make_config, make_model


@pytest.mark.parametrize("damage", ["model.safetensors", "config.json"])
def test_an_incomplete_model_folder_is_named_before_vllm_starts(tmp_path, damage):
    model = make_model(True)
    model.save_pretrained(tmp_path)
    (tmp_path / damage).unlink()
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        check_engine(make_config(tmp_path), model.config, CPU, world_size=1)


def test_rollout_tensor_parallelism_must_fit(tmp_path):
    model, config = make_model(True), make_config(tmp_path, tensor_parallel_size=2)
    named = mentions("rollout.tensor_parallel_size", 2, "world size", 1)
    with pytest.raises(ConfigError, match=named):
        check_engine(config, model.config, CPU, world_size=1)


def test_a_head_dim_vllm_has_no_kernel_for_is_a_config_error(tmp_path):
    config = LlamaConfig(**SIZES, head_dim=16)
    with pytest.raises(ConfigError, match=r"\bhead_dim\b.*\b16\b.*\b32\b.*\b64\b"):
        check_engine(make_config(tmp_path), config, CPU, world_size=1)
    latent = hf_config("deepseek_v3", kv_lora_rank=512)
    named = mentions(f"({tmp_path})", "kv_lora_rank", "qk_rope_head_dim", 512, 6, 64)
    with pytest.raises(ConfigError, match=named):
        check_engine(make_config(tmp_path), latent, CPU, world_size=1)


def test_what_is_said_before_vllm_is_imported_is_what_it_computes():
    assert list(CPU_HEAD_DIMS) == vllm_internals.cpu_head_sizes()
    assert is_cpu_build() == (vllm_internals.device_type() == "cpu")


def test_a_cache_larger_than_the_machine_is_a_config_error(tmp_path):
    config = make_config(tmp_path, cpu_kv_cache_gib=10**6)
    with pytest.raises(ConfigError, match=mentions("rollout.cpu_kv_cache_gib", 10**6)):
        check_engine(config, make_model(True).config, CPU, world_size=1)


def test_sequences_beyond_the_trained_positions_are_warned_about(tmp_path, caplog):
    config = make_config(tmp_path)
    assert make_args(config, LlamaConfig(**SIZES), CPU).max_model_len == 165
    assert not caplog.records
    short = LlamaConfig(**SIZES | {"max_position_embeddings": 100})
    args = make_args(config, short, CPU)
    assert args.hf_overrides == {"max_position_embeddings": 165}
    long = LlamaConfig(**SIZES | {"max_position_embeddings": 2**31 - 1})
    args = make_args(make_config(tmp_path), long, CPU)
    assert args.hf_overrides == {"max_position_embeddings": 165} and not args.trust_remote_code
    settings = ("data.max_prompt_tokens", "rollout.max_response_tokens")
    assert re.search(mentions(*settings, 164, 100), caplog.messages[-1])


def test_gpu_memory_is_a_fraction_and_can_be_given_back(tmp_path):
    config = make_config(tmp_path, memory_fraction=0.3)
    args = make_args(config, LlamaConfig(**SIZES), torch.device("cuda"))
    assert (args.gpu_memory_utilization, args.enable_sleep_mode) == (0.3, True)
    assert args.sleep_mode_offload_cudagraph


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_on_a_gpu_vllm_has_its_logits_in_fp32(tmp_path, quantization):
    """Like the trainer's head; vLLM's handling of the override shows on a CPU."""
    model = make_model(True)
    model.save_pretrained(tmp_path)
    config = make_config(tmp_path, precision="bf16", quantization=quantization)
    args = make_args(config, model.config, torch.device("cuda"))
    assert args.hf_overrides["head_dtype"] == "float32"
    args.enable_sleep_mode = False  # the one that a CPU refuses
    made = args.create_model_config()
    assert (made.dtype, made.head_dtype) == (torch.bfloat16, torch.float32)
    assert "head_dtype" not in make_args(config, model.config, CPU).hf_overrides


@pytest.mark.parametrize(
    ("precision", "rollout", "has_experts", "expected"),
    [
        ("fp32", {}, False, {"cpu": 1e-3, "cuda": 1e-2}),  # TF32, in vLLM's attention
        ("fp32", {}, True, {"cpu": 1e-3, "cuda": 1e-2}),  # the same experts are chosen
        ("bf16", {}, True, 0.3),
        ("fp16", {}, False, 0.02),
        ("fp16", {"quantization": "fp8"}, False, 0.3),
        ("fp8", {}, False, 0.3),
        ("bf16", {"quantization": "fp8", "verify_bound": 0.02}, True, 0.02),
    ],
)
def test_the_bound_of_a_sync_goes_by_what_rounds(
    tmp_path, precision, rollout, has_experts, expected
):
    hf_config = Qwen3MoeConfig(**SIZES) if has_experts else LlamaConfig(**SIZES)
    config = make_config(tmp_path, precision=precision, **{"verify_bound": None, **rollout})
    for device in ("cpu", "cuda"):
        bound = expected[device] if isinstance(expected, dict) else expected
        sections = (config.model, config.rollout)
        assert verify_bound(*sections, hf_config, torch.device(device)) == bound


def test_weights_from_a_quantized_folder_come_as_floats(tmp_path, monkeypatch):
    """vLLM makes layers for them, whatever config.json says (engines: `test_architectures.py`)."""
    save_model(tmp_path, "deepseek_v3", num_hidden_layers=2)
    pack_linears(tmp_path, (128, 128))
    config, hf_config = make_config(tmp_path), read_hf_config(str(tmp_path))
    of_engine = make_args(config, hf_config, CPU).hf_overrides(read_hf_config(str(tmp_path)))
    assert quantization_of(of_engine) is None and quantization_of(hf_config) == "fp8"
    assert of_engine.max_position_embeddings == 165
    # Not where vLLM reads the folder itself.
    as_stored = engine_args(config, hf_config, CPU, load_weights=True)
    assert as_stored.hf_overrides == {"max_position_embeddings": 165}
    monkeypatch.setattr(
        vllm_internals.CPUFp8BlockScaledMMKernel, "is_supported", lambda: (False, "requires AMX")
    )
    world = SimpleNamespace(device=CPU)
    with pytest.raises(ConfigError, match=mentions(f"({tmp_path})", "fp8", "CPU", "requires AMX")):
        evaluate._sample(config, None, [], {}, None, world)


def test_only_a_cpu_with_a_kernel_for_it_generates_in_fp8(tmp_path, monkeypatch):
    model = make_model(True)
    model.save_pretrained(tmp_path)
    plain = make_args(make_config(tmp_path), model.config, CPU)
    assert (plain.quantization, plain.quantization_config) == (None, None)
    config = make_config(tmp_path, precision="bf16", quantization="fp8")
    args = make_args(config, model.config, CPU)
    assert (args.quantization, args.dtype) == ("fp8_per_block", "bfloat16")
    assert args.quantization_config.ignore == ["*.gate"]
    check_engine(make_config(tmp_path), model.config, CPU, world_size=1)
    check_engine(config, model.config, torch.device("cuda"), world_size=1)
    llama = make_model(False).config
    for of_model, answer, reason in [
        (llama, (True, None), None),
        (llama, (False, "requires AMX"), "requires AMX"),
        (model.config, (True, None), "biases"),
    ]:
        monkeypatch.setattr(
            vllm_internals.CPUFp8BlockScaledMMKernel, "is_supported", lambda answer=answer: answer
        )
        if reason is None:
            check_engine(config, of_model, CPU, world_size=1)
            continue
        named = mentions("rollout.quantization", "'fp8'", "CPU", reason)
        with pytest.raises(ConfigError, match=named):
            check_engine(config, of_model, CPU, world_size=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drafts_are_verified_by_rejection_sampling(tmp_path, device):
    """EAGLE-3 weights are read from their own folder, and survive a sleep that drops the model's:
    a sync brings the model's alone. Not yet run on a GPU."""
    hf_config = LlamaConfig(**SIZES)
    plain = make_args(make_config(tmp_path), hf_config, torch.device(device))
    assert plain.speculative_config is None and not plain.sleep_preserve_parameter_names
    rollout = {"draft": "ngram", "draft_ngram": 2, "draft_tokens": 5}
    args = make_args(make_config(tmp_path, **rollout), hf_config, torch.device(device))
    assert args.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "rejection_sample_method": "standard",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 2,
    }
    assert args.per_request_spec_decode_metrics == "summary"
    rollout = {"draft": "eagle3", "draft_hf_dir": str(tmp_path / "draft")}
    args = make_args(make_config(tmp_path, **rollout), hf_config, torch.device(device))
    assert args.load_format == "dummy"
    assert args.speculative_config == {
        "method": "eagle3",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "standard",
        "draft_sample_method": "greedy",
        "draft_load_config": {"load_format": "safetensors"},
    }
    assert args.sleep_preserve_parameter_names == ["draft.*"]


def config_with_routes(folder, **rollout):
    sections = {"model": {"hf_dir": str(folder)}, "rollout": rollout}
    return config_of(sections, {"objective": {"routing_replay": "rollout"}})


@pytest.fixture
def moe(tmp_path):
    save_model(tmp_path, "qwen3_moe", hidden_size=64, head_dim=32, eos_token_id=EOS)
    return read_hf_config(str(tmp_path))


def test_on_a_cpu_routes_of_the_engine_are_refused_as_vllm_does(tmp_path, moe):
    config = config_with_routes(tmp_path)
    with pytest.raises(ConfigError, match=mentions("objective.routing_replay", "rollout", "GPU")):
        check_engine(config, moe, CPU, world_size=1)
    check_engine(config, moe, torch.device("cuda"), world_size=1)
    check_engine(config, moe, CPU, world_size=1, load_weights=True)  # it has no trainer
    with pytest.raises(ValueError, match="Model Runner V2"):
        make_args(config, moe, CPU).create_engine_config()
