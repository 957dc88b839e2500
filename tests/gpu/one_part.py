"""The process of one part: `python -m tests.gpu.one_part PART FILE FOLDER --device cuda`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from gapo_megatron.run import process_group
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.processes import quiet_libraries
from tests.gpu.parts import PARTS
from tests.gpu.report import Report
from tests.gpu.setting import Setting


def main() -> None:
    """Run a part, which writes its rows while it finds them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("rows", type=Path)
    parser.add_argument("folder", type=Path, help="removed by who started this process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    (part,) = (part for part in PARTS if part.name == options.part)
    quiet_libraries()
    with fail_fast():
        function = getattr(importlib.import_module(f"tests.gpu.{part.module}"), part.name)
        # Parts that are programs bring up a world of their own, on the whole device.
        device = options.device
        if part.module not in ("programs", "transfer"):
            device = process_group.start(600).device
        setting = Setting(device, tiny=options.tiny, folder=options.folder)
        function(setting, Report(path=options.rows))
        sys.stdout.flush()
        os._exit(0)  # tearing engines and process groups down takes time and may hang


if __name__ == "__main__":
    main()
