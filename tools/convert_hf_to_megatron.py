"""Convert a Hugging Face model folder to a Megatron-core checkpoint that loads in any layout.

Before anything is written, config.json must agree with the weights, every tensor must have exactly
one place in the model, and the disk must have space. The output appears only if every tensor is
accounted for on both sides, a sample of them (or all) is equal bit for bit when read back, and both
folders give the same logits (checked if the model fits into memory). No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_tools.conversion.command import EXIT_CODES, add_options, options, require_folders, run

EXAMPLES = """\
examples:
  .venv/bin/python tools/convert_hf_to_megatron.py --hf models/Qwen2.5-1.5B --megatron OUT
  .venv/bin/python tools/convert_hf_to_megatron.py --hf models/MODEL --megatron OUT --verify full

OUT/release is the checkpoint, OUT/hf has the config and tokenizer. Megatron-LM's --load takes OUT;
so does model.megatron_dir of a training config.

"""


def main(command_line: Sequence[str] | None = None) -> int:
    """Convert and check; 0, 1 failed, 2 usage or config, 130 interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folders = parser.add_argument_group("folders")
    folders.add_argument("--hf", type=Path, required=True, metavar="DIR", help="model to read")
    folders.add_argument(
        "--megatron", type=Path, required=True, metavar="OUT", help="folder to make"
    )
    add_options(parser)
    arguments = parser.parse_args(command_line)
    return run(lambda: _convert(arguments))


def _convert(arguments: argparse.Namespace) -> None:
    require_folders(hf=arguments.hf)
    # Imports torch and transformers, which takes seconds that --help does not need.
    from gapo_tools.conversion.directions import hf_to_megatron
    from gapo_tools.conversion.report import show

    result = hf_to_megatron(arguments.hf, arguments.megatron, options(arguments))
    settings = f"model.hf_dir={arguments.megatron}/hf model.megatron_dir={arguments.megatron}"
    show(result, next_step=f".venv/bin/python -m gapo_megatron.train CONFIG.toml {settings}")


if __name__ == "__main__":
    sys.exit(main())
