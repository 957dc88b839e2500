"""Help, errors and dry runs of programs come before torch is imported.

Not measured by time: a program runs in a separate process, and its imported modules are checked at
its end.
"""

import gc
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gapo_megatron.models.cpu_engine import is_cpu_build
from gapo_megatron.run.imports import without_garbage_collection
from gapo_tools.demonstration import demo_task
from tests.messages import mentions

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout
HEAVY = ["torch", "transformers", "megatron", "vllm"]

# Runs a program as `python FILE` or `python -m MODULE` would, and prints what it brought in. Errors
# end programs by os._exit, which runs nothing that was registered.
WATCH = """
import os, runpy, sys
heavy, program = sys.argv[1].split(","), sys.argv[2]
leave = os._exit

def report(code):
    found = [name for name in heavy if name in sys.modules]
    print("imported:", *found, file=sys.stderr, flush=True)
    leave(code)

os._exit = report
sys.argv = sys.argv[2:]
try:
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
except SystemExit as end:
    report(end.code or 0)
report(0)
"""
CONFIG = "configs/qwen2_5_7b/h100_8k.toml"
TOOLS = sorted(
    path.name
    for path in (ROOT / "tools").glob("[a-z]*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)


def start(
    *command: object, code: int = 0, options: tuple[str, ...] = (), path: str = str(ROOT)
) -> str:
    """Output of a program that must exit with `code` and import nothing heavy.

    Args:
        command: the program and its arguments.
        code: expected exit code.
        options: of Python.
        path: `PYTHONPATH`.
    """
    words = [sys.executable, *options, "-c", WATCH, ",".join(HEAVY), *map(str, command)]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].split() == ["imported:"], done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("program", ["gapo_megatron.train", "gapo_megatron.sft"])
def test_help(program: str) -> None:
    assert "usage:" in start(program, "--help")


@pytest.mark.parametrize("name", TOOLS)
def test_help_of_a_tool_that_finds_the_package_of_its_own_checkout(name: str) -> None:
    """Without an installation: without the `site` module no .pth file is read."""
    bare = {"options": ("-S",), "path": sysconfig.get_path("purelib")}
    assert "usage:" in start(ROOT / "tools" / name, "--help", **bare)


def test_a_plan_and_a_dry_run(tmp_path: Path) -> None:
    config = (CONFIG, f"run.output_dir={tmp_path}/run")
    # The data is not here; all that the config alone tells is said before.
    found = start("gapo_megatron.train", *config, "--dry-run", "--rank", "0/8", code=2)
    assert "3,807,910,400" in found  # parameters of one rank
    for name in ("data.train_path", "data.eval_path", "model.hf_dir"):
        assert f"{name} (" in found.partition("error: ")[2]
    found = start("tools/plan.py", *config, "--nodes", "1")
    assert " parallel.tensor_model_parallel_size=1 " in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run.nope=1", "run.nope"),
        ("run.num_steps=0", "run.num_steps"),
        ("batch.rollout_prompts=many", "batch.rollout_prompts"),
        ("batch.minibatch_prompts=100", "minibatch_prompts (100)"),
        ("model.hf_dir=/nowhere", "/nowhere/config.json"),
    ],
)
def test_a_wrong_config(words: str, said: str, tmp_path: Path) -> None:
    found = start("gapo_megatron.train", CONFIG, words, f"run.output_dir={tmp_path}/run", code=2)
    assert said in found.partition("error: ")[2]


def test_a_model_that_the_layout_does_not_cut(tmp_path: Path) -> None:
    shipped = ROOT / "gapo_megatron/models/published/Qwen2.5-7B.json"
    (tmp_path / "config.json").write_text(shipped.read_text())
    overrides = [f"model.hf_dir={tmp_path}", f"run.output_dir={tmp_path}/run"]
    overrides += ["parallel.tensor_model_parallel_size=8", "parallel.sequence_parallel=true"]
    found = start("gapo_megatron.train", CONFIG, *overrides, code=2)
    assert re.search(mentions("tensor_model_parallel_size (8)", "num_attention_heads (28)"), found)


@pytest.mark.skipif(not is_cpu_build(), reason="vLLM here is for GPUs, which have no such limit")
def test_a_model_that_vllm_has_no_cpu_kernel_for(tmp_path: Path) -> None:
    """Training and its dry run refuse it before torch is imported; supervised training warns."""
    initial = tmp_path / "initial"
    demo_task.write_initial_model(demo_task.write_tokenizer(["1+2=3"], initial), initial, seed=0)
    document = json.loads((initial / "config.json").read_text())
    document |= {"num_attention_heads": 8, "num_key_value_heads": 4}  # 16 per head, not 32
    (initial / "config.json").write_text(json.dumps(document))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "prompt": "1+2=", "answer": "3", "response": "3"}\n')
    files = ("data.train_path", "data.eval_path", "supervised.train_path")
    folders = ("model.hf_dir", "supervised.initial_hf_dir")
    paths = {"run.output_dir": tmp_path / "run"}
    paths |= dict.fromkeys(files, rows) | dict.fromkeys(folders, initial)
    overrides = [f"{name}={path}" for name, path in paths.items()]
    says = mentions(f"model.hf_dir ({initial})", "head_dim (16)", 32, 512)
    for options in ([], ["--dry-run"]):
        found = start("gapo_megatron.train", "configs/demo.toml", *overrides, *options, code=2)
        assert re.search(says, found.partition("error: ")[2]), found
    overrides += [f"model.hf_dir={tmp_path}/made", "supervised.num_steps=1"]
    done = subprocess.run(
        [sys.executable, "-m", "gapo_megatron.sft", "configs/demo.toml", *overrides],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    warning = mentions(f"supervised.initial_hf_dir ({initial})", "head_dim (16)")
    assert re.search(warning, done.stderr) and (tmp_path / "made" / "config.json").exists()


def test_imports_leave_garbage_collection_as_it_was() -> None:
    was_enabled = gc.isenabled()
    try:
        for switch in (gc.enable, gc.disable):
            switch()
            before = gc.isenabled()
            with without_garbage_collection():
                assert not gc.isenabled()
            assert gc.isenabled() == before
    finally:
        (gc.enable if was_enabled else gc.disable)()
        gc.unfreeze()


def test_what_was_imported_is_freed_at_the_end(tmp_path: Path) -> None:
    """Otherwise Triton reports every object as leaked."""
    (tmp_path / "cyclic.py").write_text(
        "class Cycle:\n"
        "    def __del__(self, print=print):\n"
        "        print('freed')\n"
        "cycle = Cycle()\n"
        "cycle.itself = cycle\n"
    )
    program = (
        "from gapo_megatron.run.imports import without_garbage_collection\n"
        "with without_garbage_collection():\n"
        "    import cyclic\n"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stdout == "freed\n", done.stderr


def test_other_programs_refuse_at_once(tmp_path: Path) -> None:
    assert "run.nope" in start("gapo_megatron.sft", "configs/demo.toml", "run.nope=1", code=2)
    assert "run.nope" in start("tools/plan.py", CONFIG, "run.nope=1", code=1)
    assert "run.nope" in start("tools/demo.py", "run.nope=1", code=2)
