"""A planned layout as a config file, whose base is the config that was planned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from gapo_megatron.config import Config, load_config
from gapo_megatron.config.roles import flat
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.io.toml_tree import sections_to_toml
from gapo_megatron.ops.plan.hardware import Gpu
from gapo_megatron.ops.plan.planner import Plan, leave_out, overrides
from gapo_megatron.ops.plan.search import Candidate
from gapo_megatron.ops.plan.sides import ROOMY_SHARE

_MARK = "Written by tools/plan.py --write; NOT YET RUN."


def quickest_with_room(plan: Plan) -> Candidate:
    """The quickest layout that leaves a twentieth of every GPU's memory free.

    Raises:
        ConfigError: there is none.
    """
    for candidate in roomy_candidates(plan):
        return candidate
    raise ConfigError(f"no layout leaves a twentieth of a {plan.gpu.name} free: plan more nodes")


def roomy_candidates(plan: Plan) -> list[Candidate]:
    """Candidates that leave a twentieth of every GPU's memory free, quickest first."""
    most = ROOMY_SHARE * plan.gpu.memory_bytes
    return [
        candidate
        for candidate in plan.everything
        if max(candidate.memory.training, candidate.memory.generating) <= most
    ]


def check_layout_file(path: Path) -> None:
    """Refuse, by a ConfigError, to overwrite a file that `write_layout` has not written."""
    if not os.path.lexists(path):
        return
    with naming(path), open_file(path) as file:
        is_ours = file.readline(2**12).rstrip().endswith(_MARK.encode())
    if not is_ours:
        raise ConfigError(f"--write ({path}) is another file: name one that may be written")


def write_layout(
    candidate: Candidate, path: Path, *, gpu: Gpu, base: Path, settings: Sequence[str]
) -> None:
    """Write a config with the layout of `candidate`.

    Args:
        candidate: from the plan of `base` with `settings`.
        path: path of the file, in a folder that exists.
        gpu: what it was planned for.
        base: the config that was planned.
        settings: `section.key=value` that replaced some of it.

    Raises:
        ConfigError: `base` has settings that a file over it cannot take back.
    """
    found, planned = load_config(base), load_config(base, settings)
    if names := leave_out(planned):
        raise ConfigError(f"{base}: leave {' and '.join(names)} out of it: stages become equal")
    if planned.run.output_dir == found.run.output_dir:
        folder = PurePath(found.run.output_dir).with_name(path.stem)
        settings = [*settings, f"run.output_dir={folder}"]
    config = load_config(base, [*settings, *overrides(candidate)])
    nodes = candidate.layout.num_ranks // gpu.gpus_per_node
    name = os.path.relpath(base, path.parent)
    write_atomically(path, _text(config, found, base=name, gpu=gpu, num_nodes=nodes))


def _text(config: Config, found: Config, *, base: str, gpu: Gpu, num_nodes: int) -> str:
    """TOML text with the settings in which `config` differs from `found`."""
    before = flat(found)
    sections: dict[str, dict[str, object]] = {}
    for name, value in flat(config).items():
        if value != before.get(name):
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
    size = "eight" if gpu.gpus_per_node == 8 else str(gpu.gpus_per_node)
    nodes = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
    apart = config.rollout.generation_nodes
    who = f" ({apart} for generation)" if apart else ""
    model = PurePath(config.model.hf_dir).name
    longest = f"responses of up to {config.rollout.max_response_tokens:,} tokens"
    head = f"# {model} on {nodes} of {size} {gpu.name.upper()}{who}, {longest}. {_MARK}"
    return f'{head}\nbase = "{base}"\n\n{sections_to_toml(sections)}'
