"""The process of one part: `python -m tests.gpu.one_part PART FILE --device cuda`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from gapo_megatron.launch import environment
from gapo_megatron.launch.fail_fast import fail_fast
from tests.gpu.parts import PARTS
from tests.gpu.report import Report
from tests.gpu.setting import Setting


def main() -> None:
    """Run a part and write its rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    (part,) = (part for part in PARTS if part.name == options.part)
    with tempfile.TemporaryDirectory() as folder, fail_fast():
        function = getattr(importlib.import_module(f"tests.gpu.{part.module}"), part.name)
        # Parts that are programs bring up a world of their own, on the whole device.
        device = options.device
        if part.module != "programs":
            device = environment.start(600).device
        report = Report()
        function(Setting(device, tiny=options.tiny, folder=Path(folder)), report)
        options.rows.write_text(json.dumps(report.to_json()), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)  # tearing engines and process groups down takes time and may hang


if __name__ == "__main__":
    main()
