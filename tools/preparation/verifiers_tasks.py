"""A problem file of the tasks of an environment of the package `verifiers`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError, DataError, said
from gapo_megatron.formats.folder import new_folder
from gapo_megatron.io.files import file_sha256
from gapo_megatron.io.toml_tree import read_tree
from gapo_megatron.rollout.agents.verifiers import SETTING, load_environment, row_of
from gapo_tools.preparation.output import MANIFEST, PROBLEMS


def write_tasks(config: Path, output: Path, *, num_tasks: int | None) -> int:
    """Write a folder with a row per task, and a manifest; returns the number of rows.

    Args:
        config: a run's TOML file; only `environment.settings.env` is read.
        output: folder to make; must not exist.
        num_tasks: the first so many tasks; None: all.

    Raises:
        ConfigError: the config names no environment of the package, or the package refuses it; the
            taskset is infinite and `num_tasks` is None; or the output exists.
        DataError: the taskset has no tasks, or they cannot be loaded.
    """
    env: Any = read_tree(config)
    for key in SETTING.split("."):
        env = env.get(key) if isinstance(env, dict) else None
    if not isinstance(env, dict):
        raise ConfigError(f"{config}: has no table {SETTING}, which names the environment")
    taskset = load_environment(env).taskset
    if num_tasks is None and not taskset.bounded:
        raise ConfigError(f"{SETTING}: this taskset is infinite: give --num-tasks")
    with new_folder(output, num_bytes=0) as folder:
        count = 0
        name = env["taskset"]["id"].rpartition("/")[2]
        with open(folder / PROBLEMS, "w", encoding="utf-8") as file:
            try:
                for task in itertools.islice(taskset, num_tasks):
                    file.write(json.dumps(row_of(task, name=name)) + "\n")
                    count += 1
            except Exception as error:  # code of the environment's author
                raise DataError(f"{SETTING}: loading task {count}: {said(error)}") from error
        if not count:
            raise DataError(f"{SETTING}: the taskset {name!r} has no tasks")
        outputs = {PROBLEMS: file_sha256(folder / PROBLEMS)}
        made_of = {"source": "verifiers", "env": env, "num_tasks": num_tasks}
        manifest = made_of | {"counts": {"written": count}, "outputs": outputs}
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")
    return count
