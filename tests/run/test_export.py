"""The model at the end of a run, as other programs read it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gapo_megatron.formats.weights import read_hf
from gapo_megatron.run.saving import export
from tests.distributed.conversion_setup import save_model
from tests.distributed.policy_setup import make_config


def test_it_names_the_tokens_that_ended_responses(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(base, "qwen2")
    (base / "generation_config.json").write_text('{"eos_token_id": 1}')
    config = make_config(base, run={"output_dir": str(tmp_path)})
    policy: Any = SimpleNamespace(
        iterate_hf_weights=lambda: read_hf(base), groups=SimpleNamespace(rank=0)
    )
    attempt: Any = SimpleNamespace(require_ownership=lambda: None)
    export(config, policy, attempt, end_tokens={1, 5})
    stated = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert stated == {"eos_token_id": [1, 5]}
