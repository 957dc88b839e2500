"""vLLM's own checks of what it is started with on CUDA, for every config.

Patched: the driver (it has no device), and the platform, which says it is an H100. No engine is
built: what its workers would do on the device stays untested.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapo_megatron.models.checks import num_experts
from gapo_megatron.models.config_json import facts_of
from gapo_megatron.models.published import shipped_fields, shipped_names
from tests.cuda_setup import CONFIGS, ROOT, load_driver, model_folder, needs_cuda_wheels

if TYPE_CHECKING:
    from vllm.config import VllmConfig

pytestmark = needs_cuda_wheels()


@pytest.fixture(scope="module", autouse=True)
def h100(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The platform of this process. vLLM's modules keep it, so it stays."""
    load_driver(tmp_path_factory.mktemp("driver"))
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        device_count = classmethod(lambda cls: 8)

    platforms._current_platform = H100()


def engine_config(
    path: Path, folder: Path, *settings: str, name: str = ""
) -> tuple[Any, VllmConfig]:
    from gapo_megatron.policy.model import read_hf_config
    from gapo_megatron.rollout.vllm.arguments import engine_args

    config = model_folder(path, folder, *settings, name=name)
    hf_config = read_hf_config(config.model.hf_dir)
    arguments = engine_args(config, hf_config, torch.device("cuda"), load_weights=False)
    return arguments, arguments.create_engine_config()


def asked_and_given(arguments: Any, config: VllmConfig) -> dict[str, tuple[Any, Any]]:
    """What we asked for, and what vLLM makes of it."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    given = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "logprobs_mode": model.logprobs_mode,
        "enforce_eager": model.enforce_eager,
        "enable_sleep_mode": model.enable_sleep_mode,
        "sleep_mode_offload_cudagraph": model.sleep_mode_offload_cudagraph,
        "skip_tokenizer_init": model.skip_tokenizer_init,
        "generation_config": model.generation_config,
        "seed": model.seed,
        "quantization": model.quantization,
        "load_format": config.load_config.load_format,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "distributed_executor_backend": parallel.distributed_executor_backend,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
    }
    return {name: (getattr(arguments, name), value) for name, value in given.items()}


@pytest.mark.parametrize("quantization", ["", "fp8"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_vllm_takes_our_arguments_as_they_are(
    path: Path, quantization: str, tmp_path: Path
) -> None:
    arguments, config = engine_config(path, tmp_path, f"rollout.quantization={quantization}")
    for name, (asked, given) in asked_and_given(arguments, config).items():
        assert given == asked, name
    model = config.model_config
    assert config.device_config.device_type == "cuda"
    assert model.head_dtype == torch.float32
    # Its rotary embeddings reach to the longest sequence and no further.
    assert model.hf_text_config.max_position_embeddings == arguments.max_model_len
    assert (config.quant_config is None) == (not quantization)
    assert config.compilation_config.cudagraph_mode.name != "NONE" or model.enforce_eager


PLAIN = ROOT / "configs/qwen2_5_7b/base.toml"
WITH_EXPERTS = [
    name for name in shipped_names() if num_experts(facts_of(shipped_fields(name), source=name))
]
SHORT = ("data.max_prompt_tokens=512", "rollout.max_response_tokens=1024")


@pytest.mark.parametrize("name", shipped_names())
def test_vllm_takes_every_published_model(name: str, tmp_path: Path) -> None:
    """On a GPU, where other kernels and other checks are chosen than on a CPU."""
    arguments, config = engine_config(PLAIN, tmp_path, *SHORT, name=name)
    for field, (asked, given) in asked_and_given(arguments, config).items():
        assert given == asked, field
    assert config.quant_config is None
    assert config.model_config.head_dtype == torch.float32


@pytest.mark.parametrize("settings", [(), ("rollout.draft=ngram",)], ids=["", "drafts"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_vllm_returns_the_routes_of_every_published_model_with_experts(
    name: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import vllm

    monkeypatch.setattr(vllm, "HAS_TRITON", True)  # it looks for a device
    settings = (*SHORT, *settings, "objective.routing_replay=rollout")
    arguments, config = engine_config(PLAIN, tmp_path, *settings, name=name)
    assert config.aux_output_config.enable_return_routed_experts
    assert config.use_v2_model_runner and config.cache_config.enable_prefix_caching
    for field, (asked, given) in asked_and_given(arguments, config).items():
        assert given == asked, field
