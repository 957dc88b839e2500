"""Shapes of the models that configs/ names, for a plan or a dry run before the model is there.

NAME.json beside this file has what config.json of a published model says of shapes and of what is
computed; nothing of its tokenizer or dtype. NAME is the last part of `model.hf_dir`:

| NAME | published as |
| --- | --- |
| Qwen2.5-7B, Qwen2.5-32B, Qwen2.5-72B, Qwen2.5-Math-1.5B, Qwen3-30B-A3B | Qwen/NAME |
| DeepSeek-R1-Distill-Qwen-1.5B | deepseek-ai/NAME |
| Llama-3.1-8B-Instruct, Llama-3.1-70B-Instruct, Llama-3.2-3B-Instruct | meta-llama/NAME |
| warm_start | made by `make demo` and by the miniature study (`ops.prepare.demo_task`) |

Training never reads them: it needs the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapo_megatron.io.documents import read_object
from gapo_megatron.models.config_json import ModelFacts, facts_of, read_model_facts

_HERE = Path(__file__).parent


def shipped_names() -> list[str]:
    """Models whose shapes are here."""
    return sorted(path.stem for path in _HERE.glob("*.json"))


def shipped_fields(name: str) -> dict[str, Any]:
    """What config.json says of a model whose shapes are here."""
    return read_object(_HERE / f"{name}.json")


def find_model(hf_dir: str) -> tuple[ModelFacts | None, str]:
    """The model of `model.hf_dir`, for arithmetic alone.

    Returns:
        What config.json of the folder says, and ""; where there is no such folder, the shapes that
        are here under its name, and a sentence that says so; None and "" where there are none.

    Raises:
        ConfigError: the folder is there, and its config.json is not or cannot be used.
    """
    folder = Path(hf_dir)
    if folder.is_dir():
        return read_model_facts(hf_dir), ""
    if folder.name not in shipped_names():
        return None, ""
    note = (
        f"Model: no folder {hf_dir} here; its shapes are those shipped with this package, as "
        f"published (gapo_megatron/models/published/{folder.name}.json). Training needs the folder."
    )
    return facts_of(shipped_fields(folder.name), source=f"{folder.name}.json"), note
