"""Problem files of a config's generated data sources."""

from __future__ import annotations

import json
from pathlib import Path

from gapo_megatron.config import load_config
from gapo_megatron.data.reasoning_gym import generate
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.folder import new_folder
from gapo_megatron.io.files import file_sha256
from gapo_megatron.rewards.reasoning_gym import installed_version
from gapo_tools.preparation.output import MANIFEST, PROBLEMS

HELD_OUT = "held_out.jsonl"


def write_generated(config: Path, output: Path) -> dict[str, int]:
    """Write a folder with the problems that a run of the config would generate, and a manifest.

    Args:
        config: a run's TOML file.
        output: folder to make; must not exist.

    Returns:
        Number of rows by file: the training problems, and those held out, if there are any.

    Raises:
        ConfigError: the config has no generated source; or see `generate`; or the output exists.
    """
    sources = load_config(config, ()).data.generated
    if not sources:
        raise ConfigError(f"{config}: has no data.source of the kind 'reasoning_gym'")
    made = generate(sources)
    parts = {PROBLEMS: made.training, HELD_OUT: made.held_out}
    rows = {
        name: [{**one, "id": f"{source}/{one['id']}"} for source in by for one in by[source]]
        for name, by in parts.items()
    }
    with new_folder(output, num_bytes=0) as folder:
        for name in filter(rows.get, rows):
            text = "".join(json.dumps(row) + "\n" for row in rows[name])
            (folder / name).write_text(text, encoding="utf-8")
        manifest = {
            "source": "reasoning_gym",
            "version": installed_version(),
            "sources": [one.model_dump(mode="json") for one in sources],
            "counts": {"written": len(rows[PROBLEMS]), "repeated": made.num_repeated},
            "outputs": {name: file_sha256(folder / name) for name in filter(rows.get, rows)},
        }
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")
    return {name: len(some) for name, some in rows.items() if some}
