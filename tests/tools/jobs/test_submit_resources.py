"""Runs of one study that ask for resources of their own: arrays, checks, ranks on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.run_folder import mark_finished
from gapo_megatron.io.toml_tree import to_toml
from gapo_tools import submit as tool
from gapo_tools.jobs.study import Resources, read_study
from gapo_tools.jobs.submit import Submission, world_sizes
from tests.messages import mentions
from tests.submit_setup import environment, submit, write_study

# Runs beside the grid's: two that ask for more, alike, and one for yet something else.
LARGER = (
    "[[runs]]\nrun.seed = 7\nresources.nodes = 2\n"
    "[[runs]]\nrun.seed = 8\n[runs.resources]\ntasks_per_node = 1\ntime = '30'\n"
    "[[runs]]\nrun.seed = 9\nresources.nodes = 2\n"
)


class Done(NamedTuple):
    """What the tool said."""

    exit_code: int
    out: str
    err: str


Here = Callable[..., Done]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    """tools/submit.py in this process, where it starts none: a study that is refused or shown."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **env: str) -> Done:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment(tmp_path, **env))
            exit_code = tool.main(arguments)
        said = capsys.readouterr()
        return Done(exit_code, said.out, said.err)

    return run


def refused(done: Done, named: str) -> None:
    """Nothing is submitted, and the error names what is wrong."""
    assert (done.exit_code, done.out) == (2, "")
    assert re.search(named, done.err), done.err


def test_runs_of_equal_resources_are_one_array(tmp_path: Path, here: Here) -> None:
    """The scripts one after another, each with its own runs and links."""
    study = write_study(tmp_path, num_runs=2, num_steps=5, more=LARGER)
    options = (str(study), "--dry-run", "--chain=2", "--time=40")
    refused(here(*options), r"\btime\W+40\b.*\b1-00:00:00, 30\b")
    done = here(str(study), "--dry-run", "--chain=2", "--parallel=2")
    assert (done.exit_code, done.err) == (0, "")
    codes = re.findall(r"^  (\S+)$", done.out, re.MULTILINE)
    code = Path(codes[0]).name
    usual = Resources(tasks_per_node=2, gpus_per_node=0, cpus_per_task=1, exclusive=False)
    expected = [
        Submission(
            name="study",
            folder=tmp_path / "runs" / "submitit",
            codes=[tmp_path / "runs" / run / "code" / code for run in runs],
            resources=usual.replaced(given),
            parallel=2,
            chain=2,
        )
        for runs, given in (
            (["seed_0", "seed_1"], {}),
            (["seed_7-nodes_2", "seed_9-nodes_2"], {"nodes": 2}),
            (["seed_8-tasks_per_node_1"], {"tasks_per_node": 1, "time": "30"}),
        )
    ]
    assert done.out == "\n".join(text for one in expected for text in one.scripts())
    option = re.compile(r"^#SBATCH --(array|nodes|ntasks-per-node)=(\S+)$", re.MULTILINE)
    of_each = [
        {"array": "0-1%2", "nodes": "1", "ntasks-per-node": "2"},
        {"array": "0-1%2", "nodes": "2", "ntasks-per-node": "2"},
        {"nodes": "1", "ntasks-per-node": "1"},
    ]
    assert option.findall(done.out) == [
        pair for one in of_each for _ in range(2) for pair in one.items()
    ]
    assert not (tmp_path / "runs").exists()


def test_each_run_is_checked_against_its_own_ranks(tmp_path: Path, here: Here) -> None:
    more = "[[runs]]\nparallel.pipeline_model_parallel_size = 4\nresources.nodes = {}\n"
    study = write_study(tmp_path, num_runs=1, num_steps=5, more=more.format(2))
    dry_run = (str(study), "--dry-run")
    assert here(*dry_run).exit_code == 0
    # Spare nodes are those of every run: they would train on another number of ranks than they say.
    differ = r"\bNUM_NODES\W+1\b.*\bnodes\W+1, 2\b"
    refused(here(*dry_run, NUM_NODES="1"), differ)
    refused(here(*dry_run, NUM_NODES="two"), r"\bNUM_NODES\W+two\b")
    # Also where those that are left ask for as many.
    (tmp_path / "runs" / "seed_0").mkdir(parents=True)
    finished = read_study(study).runs[0]
    (tmp_path / "runs" / "seed_0" / "config.toml").write_text(to_toml(finished.config))
    mark_finished(tmp_path / "runs" / "seed_0", num_steps=5)
    refused(here(*dry_run, NUM_NODES="1"), differ)
    assert here(*dry_run).out.count("#!/bin/bash") == 1
    write_study(tmp_path, num_runs=1, num_steps=5, more=more.format(3))
    settings = ("parallel.pipeline_model_parallel_size", "world size", 6)
    refused(here(*dry_run), mentions("pipeline_model_parallel_size_4-nodes_3", *settings))


def test_nodes_that_generate_are_those_of_the_environment_too(tmp_path: Path, here: Here) -> None:
    """As with sbatch; and each run must have nodes that are left to train."""
    dry_run, env = ("study.toml", "--dry-run"), {"GENERATION_NODES": "1"}
    write_study(tmp_path, num_runs=1, num_steps=5)
    refused(here(*dry_run, **env), mentions("seed_0", "rollout.generation_nodes", 1))
    done = here(*dry_run, "--nodes=2", **env)
    assert (done.exit_code, done.err) == (0, "")
    # Of two nodes of two ranks one trains: on both of its ranks.
    wide = ("parallel.tensor_model_parallel_size=4", "rollout.generation_nodes=1")
    refused(
        here(*dry_run, "--nodes=2", *wide),
        mentions("seed_0", "parallel.tensor_model_parallel_size", 4, "world size", 2),
    )


def test_runs_have_ranks_and_gpus_of_their_own_here_too(tmp_path: Path, here: Here) -> None:
    """Some of which may only generate."""
    more = (
        "[[runs]]\nrun.seed = 7\nrollout.generation_ranks = 1\n"
        "resources.tasks_per_node = 3\nresources.gpus_per_node = 3\n"
        "[[runs]]\nrun.seed = 8\nresources.tasks_per_node = 1\nresources.gpus_per_node = 1\n"
    )
    write_study(tmp_path, num_runs=1, num_steps=3, more=more)
    done = submit(tmp_path, "study.toml", "--local", CUDA_VISIBLE_DEVICES="2,3,5")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {}
    for run_dir in (tmp_path / "runs").glob("seed_*"):
        logs = sorted((run_dir / "attempts" / "latest").glob("rank_*.log"))
        told = [json.loads(log.read_text().splitlines()[0]) for log in logs]
        for env in told:
            assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == str(len(logs))
        # Frozen with the code: a restart generates where this start did.
        generate = load_config(told[0]["config"]).rollout.generation_ranks
        seen[run_dir.name] = (len(logs), told[0].get("CUDA_VISIBLE_DEVICES", ""), generate)
    assert seen == {
        "seed_0": (2, "", 0),
        "seed_7-generation_ranks_1-tasks_per_node_3": (3, "2,3,5", 1),
        "seed_8-tasks_per_node_1": (1, "2", 0),
    }
    write_study(tmp_path, num_runs=1, num_steps=3, more=LARGER)
    named = r"\bseed_7-nodes_2\b.*\bnodes\W+2\b.*--local\b"
    refused(here("study.toml", "--local"), named)
    write_study(tmp_path, num_runs=1, num_steps=4)
    command = ("study.toml", "--local", "rollout.generation_ranks=2")
    refused(here(*command), mentions("seed_0", "rollout.generation_ranks", 2))


# -- what is written into a batch script -----------------------------------------------------------

PLAIN = Submission(
    name="clips",
    folder=Path("/runs/clips/submitit"),
    codes=[Path("/runs/clips/seed_0/code/submitted")],
    resources=Resources(),
    parallel=1,
    chain=1,
)
ODD = [
    *("a b", "it's", 'a "b"', "#SBATCH --account=x", "$(touch x)", "`touch x`", "${HOME}", "a;b"),
    *("*", "{a,b}", "=", "-x", "é", "')"),
]
BREAKING = ["a\n#SBATCH --account=x", "a\r", "\0", "\u2028"]


def options(script: str) -> dict[str, str]:
    """As sbatch reads them: up to the first line that is no comment."""
    found = {}
    for line in script.split("# setup")[0].splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            key, _, value = word.removeprefix("--").partition("=")
            found[key] = value
    return found


@pytest.mark.parametrize("name", ODD)
def test_a_name_is_one_word_of_the_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    odd = replace(PLAIN, name=name, folder=folder, codes=[folder / "code" / "submitted"])
    monkeypatch.setattr(sys, "executable", f"/envs/{name}/python")
    (script,) = odd.scripts()
    (usual,) = PLAIN.scripts()
    assert len(script.splitlines()) == len(usual.splitlines())
    assert options(script) == options(usual) | {
        "job-name": name,
        "output": f"{folder}/%j_0_log.out",
    }
    # The shell's part, as it runs: what would be started, and its environment.
    show = 'exec() { printf \'%s\\n\' "$PYTHONPATH" "$PYTHON" "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", show + script], env={"HOME": "/"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        str(odd.codes[0]),
        sys.executable,
        *(sys.executable, "-u", "-m", "submitit.core._submit", str(folder)),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*BREAKING, "\\", "%j"])
def test_a_name_that_is_none_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/runs") / name
    for odd in (
        replace(PLAIN, folder=folder),
        replace(PLAIN, codes=[folder / "code" / "x"]),
        *([replace(PLAIN, name=name)] if name != "%j" else []),
    ):
        for use in (odd.scripts, odd.submit):
            with pytest.raises(ConfigError, match=mentions(repr(name)[1:-1])):
                use()
    if name in BREAKING:
        monkeypatch.setattr(sys, "executable", f"/envs/{name}/python")
        with pytest.raises(ConfigError, match=mentions(repr(name)[1:-1])):
            PLAIN.scripts()


def test_what_is_asked_for_is_a_word(tmp_path: Path) -> None:
    """By a study or on the command line; also what only Slurm would refuse, after a freeze."""
    for field in ("partition", "account"):
        for name in [*ODD, *BREAKING, "", "a" * 300]:
            if name in ("=", "-x"):
                continue
            with pytest.raises(ConfigError, match=mentions(field, repr(name)[1:200])):
                Resources().replaced({field: name})
        for name in ("h100,h200", "abc@v100", "def-smith_gpu"):
            (script,) = replace(PLAIN, resources=Resources().replaced({field: name})).scripts()
            assert options(script)[field] == name
    for name in ("1\n#SBATCH --account=x", "٣", "9" * 30, "", "1:"):
        with pytest.raises(ConfigError, match=mentions("time", repr(name)[1:-1])):
            Resources().replaced({"time": name})
    for field in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task"):
        with pytest.raises(ConfigError, match=mentions(field, 65536)):
            Resources().replaced({field: 2**16})


@pytest.mark.parametrize("nodes", ["0", "two", "٣", "9" * 99])
def test_spare_nodes_are_a_number(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_NODES", nodes)
    with pytest.raises(ConfigError, match=mentions("NUM_NODES", repr(nodes)[:100])):
        world_sizes([Resources()])
