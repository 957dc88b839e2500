"""Convert a Megatron-core checkpoint of any layout to a Hugging Face model folder.

Reads the output of convert_hf_to_megatron.py, a run folder of this project (its newest checkpoint,
or the checkpoints/step_* given), and Megatron-LM checkpoints of the format torch_dist, without the
optimizer state. Checks the same as the other tool, and that the checkpoint's record of its model
agrees with config.json. No GPU is needed.

A run with an adapter saves its factors alone: --adapter peft makes the folder that peft and vLLM
load beside the base, and --adapter merged the whole model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_tools.conversion.command import (
    EXIT_CODES,
    add_options,
    options,
    require_folders,
    run,
    to_bytes,
)

EXAMPLES = """\
examples:
  .venv/bin/python tools/convert_megatron_to_hf.py --megatron models/Qwen2.5-1.5B-megatron --hf OUT
  .venv/bin/python tools/convert_megatron_to_hf.py --megatron runs/gapo --hf OUT --dtype bf16
  .venv/bin/python tools/convert_megatron_to_hf.py --megatron checkpoints/iter_0001000 --hf OUT \\
    --hf-config models/Qwen2.5-1.5B
  .venv/bin/python tools/convert_megatron_to_hf.py --megatron runs/lora --hf OUT --adapter peft

"""


def main(command_line: Sequence[str] | None = None) -> int:
    """Convert and check; 0, 1 failed, 2 usage or config, 130 interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folders = parser.add_argument_group("folders")
    folders.add_argument(
        "--megatron",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint, a folder of them (the newest), or a run to read",
    )
    folders.add_argument("--hf", type=Path, required=True, metavar="OUT", help="folder to make")
    folders.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer; with --adapter, the base and its weights "
        "(default: the one of the checkpoint)",
    )
    folders.add_argument(
        "--adapter",
        choices=("peft", "merged"),
        help="what to make of a run with an adapter: its factors, or the whole model",
    )
    add_options(parser)
    parser.add_argument(
        "--max-shard-size",
        type=to_bytes,
        default="5GB",
        metavar="SIZE",
        help="largest size of a safetensors file (default: 5GB)",
    )
    arguments = parser.parse_args(command_line)
    return run(lambda: _convert(arguments))


def _convert(arguments: argparse.Namespace) -> None:
    require_folders(megatron=arguments.megatron, hf_config=arguments.hf_config)
    # Imports torch and transformers, which takes seconds that --help does not need.
    from gapo_tools.conversion.adapter import convert_adapter
    from gapo_tools.conversion.directions import megatron_to_hf
    from gapo_tools.conversion.report import show

    if arguments.adapter is not None:
        checks = convert_adapter(
            arguments.megatron,
            arguments.hf,
            options(arguments),
            kind=arguments.adapter,
            base_dir=arguments.hf_config,
        )
        for name, found in checks.items():
            print(f"{name}: {found}")
        print(f"wrote {arguments.hf}")
        return
    result = megatron_to_hf(
        arguments.megatron,
        arguments.hf,
        options(arguments),
        hf_config_dir=arguments.hf_config,
        max_shard_bytes=arguments.max_shard_size,
    )
    show(result, next_step=f"vllm serve {arguments.hf}")


if __name__ == "__main__":
    sys.exit(main())
