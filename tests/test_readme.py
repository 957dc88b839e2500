"""The commands of README.md: each can be typed in a fresh clone, in their order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.config.rules import input_paths

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BROUGHT = ("deepscaler.json", "models/", "data/benchmarks", "runs/", "slurm/site.sh")
"""Inputs that a user brings, or that a run has made."""


def commands() -> list[list[str]]:
    """Every command of the README's blocks, as words; lines that a backslash joins are one."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@cache
def help_of(*program: str) -> str:
    done = subprocess.run(
        [sys.executable, *program, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


def test_there_are_commands_to_look_at() -> None:
    tools = {words[1] for words in commands() if words[0] == ".venv/bin/python"}
    assert {"-m", "tools/prepare_data.py", "tools/plan.py", "tools/report.py"} <= tools
    assert len(commands()) > 15


COMMAND = re.compile(
    r"(tools/\w+\.py|-m gapo_megatron\.(?:train|sft))"
    r"(?: (measure|own|deepscaler|deepcoder|verifiers)\b)?([^\n`|;]*)"
)
FOLDERS = (".", "docs", "docs/howto", "benchmarks", "studies/*")
DOCUMENTS = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")]
PRINTED = [
    *(str(path.relative_to(ROOT)) for path in [*DOCUMENTS, *ROOT.glob("slurm/*")]),
    *(f"tools/{path.name}" for path in ROOT.glob("tools/[a-z]*.py")),
    "tools/plan.py measure",
]


@pytest.mark.parametrize("name", PRINTED)
def test_every_option_that_documents_and_help_print_is_there(name: str) -> None:
    program = name.split()
    is_tool = program[0].startswith("tools/")
    text = help_of(*program) if is_tool else (ROOT / name).read_text(encoding="utf-8")
    for program_text, sub, rest in COMMAND.findall(text.replace("\\\n", " ")):
        known = help_of(*program_text.split(), *([sub] if sub else []))
        options = re.findall(r"(?<=\s)--[a-z][a-z-]*", rest.partition(" #")[0])
        assert [option for option in options if option not in known] == [], program_text + rest


def test_every_file_is_here_or_brought_or_made_before() -> None:
    made: set[str] = set()
    for words in commands():
        for path in words:
            is_path = "/" in path and " " not in path
            is_path &= not path.startswith(("-", ".venv/", "http"))
            is_path &= not re.search(r"[<>$@]|^/|^\d+/\d+$", path)
            if is_path and not path.startswith(BROUGHT):
                known = (ROOT / path).exists() or any(path.startswith(one) for one in made)
                assert known or words[words.index(path) - 1] == "--output", (words, path)
        if "--output" in words:
            made.add(words[words.index("--output") + 1])
    for words in commands():
        for path in (word for word in words if word.startswith("configs/")):
            if "gapo_megatron.train" not in words:
                continue
            config = load_config(ROOT / path)  # everything that it reads exists by now
            for name, read in input_paths(config).items():
                known = not read or read.startswith(BROUGHT) or str(Path(read).parent) in made
                assert known, (path, name, read)
