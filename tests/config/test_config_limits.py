"""No value passes the config and fails late: every field is tried with the extremes of its type."""

from __future__ import annotations

import copy
import datetime
import io
import json
import math
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gapo_megatron.config import Config, load_config, parse_config
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.io.documents import parse_toml
from gapo_megatron.io.toml_tree import apply_override, to_toml
from gapo_megatron.sft import train_supervised
from gapo_megatron.train import check_before_imports
from gapo_tools.dry_run.command import print_dry_run
from tests.messages import mentions

MINIMAL = """
[run]
output_dir = "runs/x"
num_steps = 3
[model]
hf_dir = "models/x"
[data]
train_path = "data/x.jsonl"
eval_path = "data/y.jsonl"
[batch]
max_tokens_per_microbatch = 2147483647
[rollout]
max_response_tokens = 64
[reward]
kind = "exact"
[supervised]
initial_hf_dir = "models/y"
train_path = "data/z.jsonl"
num_steps = 2
"""
INTEGERS = [
    *(-(2**63), -1, 0, 1, 2, 2**12, 2_000_000, 2**24, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200),
]
NUMBERS = [
    *(-1.0, -0.0, 5e-324, 1e-300, 1e-45, 1e-30, 0.5, 1.0, 2.0, 1e6, 1e30, 1e38, 1e308),
    *(math.nan, math.inf),
]
STRINGS = [
    *("", " ", "x ", "\0", "a\nb", "a\r", "\x1b[2J", "\x7f", "\x85", "\u2028", "\ud800", "\t"),
    *("~", "~/x", "[/x]", "[bold]", "é", "😀", '"', "\\", "'", "%j", "$(touch x)", "a b", "#", "="),
    *("x" * 200, "x" * 300, "a/" * 3000, "..", "/dev/null", "fifo", "loop", "loop/x"),
    *("apptainer:/[/x]", "https://h:" + "9" * 5000, "https://h:1"),
]
OTHERS = [True, [], [1], [2**31], ["\n"], {}, {"a": 1}, datetime.date(2024, 1, 1)]


FIELDS = [(section, key) for section, model in Config.sections().items() for key in model.roles()]


def tree_with(section: str, key: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(tomllib.loads(MINIMAL))
    tree.setdefault(section, {})[key] = value
    return tree


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a pipe and a link to itself."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("section", "key"), FIELDS, ids=lambda name: name)
def test_a_value_is_refused_by_name_or_comes_back_from_the_runs_config(
    section: str, key: str
) -> None:
    for value in [*INTEGERS, *NUMBERS, *STRINGS, *OTHERS]:
        try:
            config = parse_config(tree_with(section, key, value), source="FILE")
        except ConfigError as error:
            message = str(error)
            assert section in message and key in message, message
            assert all(line.isprintable() for line in message.split("\n")), ascii(message)
            assert len(message) < 1000
            # A rule of two settings writes them as they were read, `true` like TOML.
            given = value[0] if isinstance(value, list) and value else value
            inner = [*given.values()] if isinstance(given, dict) else []
            assert any(
                text[:50] in message
                for one in (given, *inner)
                for text in (repr(one), str(one).lower(), *_as_float(one))
            ), (value, message)
        else:
            written = parse_toml(to_toml(config), where="written")
            assert parse_config(written, source="written") == config, value


def _as_float(value: Any) -> list[str]:
    return [repr(float(value))] if isinstance(value, int) and abs(value) < 2**100 else []


@pytest.mark.usefixtures("here")
def test_a_dry_run_ends_well_or_names_what_is_wrong() -> None:
    """Of every text that a field takes, and of the largest and the smallest number."""
    num_refused = 0
    for section, key in FIELDS:
        taken: list[Config] = []
        for value in [*INTEGERS, *NUMBERS, *STRINGS]:
            try:
                taken.append(parse_config(tree_with(section, key, value), source="FILE"))
            except ConfigError:
                continue
        if key == "branch_from":  # where its folder is, torch reads the checkpoint
            taken = [one for one in taken if "loop" in one.checkpoint.branch_from]
        if not all(isinstance(getattr(getattr(one, section), key), str) for one in taken):
            taken = [taken[0], taken[-1]]
        for config in taken:
            console = Console(markup=False, file=io.StringIO(), width=120)
            try:
                print_dry_run(config, world_size=1, console=console)
            except GapoError as error:
                assert key in str(error), error
                num_refused += 1
    assert num_refused >= 8 * 2  # links in a circle


@pytest.mark.parametrize("start", [check_before_imports, train_supervised])
def test_a_start_names_a_path_that_leads_nowhere(
    here: Path, start: Callable[[Config], object]
) -> None:
    config = parse_config(tree_with("data", "eval_path", "loop/x"), source="FILE")
    before = sorted(here.rglob("*"))
    with pytest.raises(ConfigError, match=mentions("data.eval_path", "'loop/x'")):
        start(config)
    assert sorted(here.rglob("*")) == before


# --- what the limits are for ----------------------------------------------------------------------


def taken(section: str, key: str) -> list[float]:
    """Numbers that the field takes, of powers of two and those beside them: whole ones, or all."""
    whole = [2**power + more for power in range(140) for more in (-1, 0)]
    values = []
    for one in [2.0**-power for power in range(1, 400)] + [2_000_000, *whole]:
        try:
            config = parse_config(tree_with(section, key, one), source="FILE")
        except ConfigError:
            continue
        values.append(getattr(getattr(config, section), key))
    return values


def largest(section: str, key: str) -> float:
    return max(taken(section, key))


def test_the_largest_values_are_those_of_the_libraries() -> None:
    seed = int(largest("run", "seed"))
    torch.Generator().manual_seed(seed)
    with pytest.raises(ValueError, match="Overflow"):
        torch.Generator().manual_seed(seed + 1)
    for section, key in (
        ("parallel", "timeout_s"),
        ("reward", "timeout_s"),
        ("run", "stop_margin_s"),
    ):
        milliseconds = (largest(section, key) + 60) * 1000
        assert 2**30 < milliseconds < 2**31, (section, key)


@pytest.mark.system  # for its import alone
def test_temperatures_are_those_that_vllm_takes_as_they_are() -> None:
    from vllm import SamplingParams

    for section in ("rollout", "evaluation"):
        for temperature in (0.01, largest(section, "temperature")):
            assert SamplingParams(temperature=temperature).temperature == temperature
    with pytest.raises(Exception, match="temperature"):
        SamplingParams(temperature=2.1)
    assert SamplingParams(temperature=0.009).temperature == 0.01  # so it is not what was asked for


def test_no_optimizer_setting_overflows_float32() -> None:
    """AdamW's first update, written out as torch does it: its module takes seconds to import."""
    beta, weight_decay = 1 - 2**-53, largest("optimizer", "weight_decay")
    rates, epsilons = taken("optimizer", "learning_rate"), taken("optimizer", "eps")
    for learning_rate in (min(rates), max(rates)):
        for eps in (min(epsilons), max(epsilons)):
            weight, gradient = torch.ones(2), torch.tensor([0.0, 1.0])
            first, second = gradient * (1 - beta), gradient**2 * (1 - beta)
            weight.mul_(1 - learning_rate * weight_decay)
            denominator = second.sqrt().div_(math.sqrt(1 - beta)).add_(eps)
            weight.addcdiv_(first, denominator, value=-learning_rate / (1 - beta))
            assert weight.isfinite().all(), (learning_rate, eps)
    for section, key in (("objective", "importance_weight_max"), ("objective", "eps_high_max")):
        torch.ones(2).clamp(max=largest(section, key))


@pytest.mark.parametrize(
    ("section", "key", "most"),
    [("run", "output_dir", 200), ("model", "hf_dir", 200), ("data", "eval_path", 255)],
)
def test_a_path_leaves_room_for_what_is_in_it(section: str, key: str, most: int) -> None:
    """In bytes: Linux takes 255 of a name, and 4,095 of a path; drafts of what is made add some."""
    for path in ("x" * most, "ü" * (most // 2), "/".join(["x" * 127] * 16)):
        parse_config(tree_with(section, key, path), source="FILE")
    for path in ("x" * (most + 1), "ü" * (most // 2 + 1), "/".join(["x" * 127] * 17)):
        with pytest.raises(ConfigError, match=mentions(f"{section}.{key}", 2048, most)):
            parse_config(tree_with(section, key, path), source="FILE")


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [("optimizer.eps", 1e-40, "1e-30"), ("objective.kl_coef", 1e38, "1e+30")],
)
def test_a_limit_is_written_as_a_person_would(name: str, value: float, limit: str) -> None:
    with pytest.raises(ConfigError, match=mentions(name, limit)):
        parse_config(tree_with(*name.split("."), value), source="FILE")


# --- files and overrides --------------------------------------------------------------------------


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_files_that_are_none(here: Path) -> None:
    for name in ("fifo", "loop", "x\0", "x" * 300, "/"):
        assert repr(name)[1:-1] in repr(refused(Path(name)))
        (here / "one.toml").write_text(f"base = {json.dumps(name)}\n" + MINIMAL)
        assert repr(name)[1:-1] in repr(refused(here / "one.toml"))


def test_files_on_each_other_have_a_limit(here: Path) -> None:
    for number in range(2000):
        (here / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    assert re.search(mentions("16.toml", "17.toml", "base", 16), refused(here / "0.toml"))


def test_values_that_only_a_parser_takes(here: Path) -> None:
    path = here / "one.toml"
    for value in ("9" * 5000, "0x" + "f" * 5000, "[" * 5000, "[" * 100 + "]" * 100, "1e400"):
        path.write_text(MINIMAL + f"[run2]\nseed = {value}\n")
        assert str(path) in refused(path)
        path.write_text(MINIMAL)
        assert "run.seed" in refused(path, f"run.seed={value}")
    assert "run.num_steps" in refused(path, "run.num_steps=1e400")
    # A key that is no word is shown as Python writes it.
    path.write_text(MINIMAL + '[optimizer]\n"a\\nb" = 1\n')
    assert re.search(mentions("optimizer", r"'a\nb'"), refused(path))


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1\nnum_steps=7",
        "run.seed=1\n[rollout]\ntemperature=0.5",
        "run.seed={}\nvalue.x=2",
        'metrics.wandb_project="a"\nseed=1',
        "run\n.seed=1",
        "[run].seed=1",
        "model.hf_dir=a\ud800",
    ],
)
def test_an_override_sets_one_value_or_none(here: Path, override: str) -> None:
    path = here / "one.toml"
    path.write_text(MINIMAL)
    message = refused(path, override)
    name = override.partition("=")[0]
    assert name in message or repr(name)[1:-1] in message
    assert message.replace("\n  ", "").isprintable()


def test_a_value_may_have_several_lines_and_a_comment() -> None:
    tree: dict[str, Any] = {}
    apply_override(tree, "checkpoint.keep_steps=[\n 1,\n 2\n] # both")
    assert tree == {"checkpoint": {"keep_steps": [1, 2]}}
