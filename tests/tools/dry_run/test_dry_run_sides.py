"""The dry run of a run of two sides: ranks that train, and ranks that generate."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import to_toml
from gapo_tools.dry_run import command as dry_run
from gapo_tools.dry_run.data import Seen
from gapo_tools.planner.deep_dry_run import print_deep_dry_run
from tests import scaling_setup
from tests.messages import mentions
from tests.tools.dry_run.test_dry_run import make_config, text_of


def rows_of(text: str) -> dict[str, str]:
    """The table of processes: name -> text, lines of one row joined."""
    rows: dict[str, str] = {}
    name = ""
    for line in text.split("World-size arithmetic")[1].split("└")[0].splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 2:
            name = cells[0] or name
            rows[name] = f"{rows.get(name, '')} {cells[1]}".strip()
    return rows


def test_both_sides_are_said() -> None:
    config = make_config(
        rollout={"generation_nodes": 2, "tensor_parallel_size": 4},
        parallel={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        batch={"rollout_prompts": 256, "minibatch_prompts": 64, "rollouts_per_prompt": 8},
    )
    rows = rows_of(text_of(config, world_size=48, ranks_per_node=8))
    assert rows["processes"] == "48 (8 per node): 32 train, 16 generate"
    expected = "ranks 0-31 on nodes 0-3: 32 = tensor 2 x pipeline 2 x data 8"
    assert rows["training side"] == expected
    expected = "ranks 32-47 on nodes 4-5: .* 4, each with 4 process.* 64 prompts = 512 sequences$"
    assert re.match(expected, rows["generation side"])
    # An update is the trainers' alone.
    assert rows["one update"].endswith("about 64 per data-parallel rank")
    assert "vLLM replicas" not in rows and "on-policy" in rows["schedule"]


def test_ranks_of_a_node_are_the_launchers_else_slurms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dry_run, "look_at_inputs", lambda *_, **__: Seen())

    def said() -> str:
        dry_run.main()
        return rows_of(capsys.readouterr().out)["processes"]

    path = tmp_path / "config.toml"
    path.write_text(to_toml(make_config(rollout={"generation_nodes": 1})))
    monkeypatch.setattr(sys, "argv", ["train", str(path), "--dry-run=plain", "--rank=0/32"])
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert "24 train" in said()
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert "28 train" in said()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert said() == "32 (2 per node): 30 train, 2 generate"


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        # Of all 32 ranks these would be whole.
        (
            {"parallel": {"tensor_model_parallel_size": 16}},
            ["parallel.tensor_model_parallel_size (16)", "world size (24)", "24 of 32"],
        ),
        (
            {"rollout": {"tensor_parallel_size": 16}},
            ["rollout.tensor_parallel_size (16)", "8 of 32"],
        ),
        ({"rollout": {"generation_nodes": 4}}, ["rollout.generation_nodes (4)", "nodes (4)"]),
    ],
)
def test_a_layout_must_divide_its_own_side(
    sections: dict[str, dict[str, Any]], names: list[str]
) -> None:
    rollout = {"generation_nodes": 1} | sections.pop("rollout", {})
    with pytest.raises(ConfigError, match=mentions(*names)):
        text_of(make_config(rollout=rollout, **sections), world_size=32)


def test_a_rank_that_trains_is_built_among_those_that_train(tmp_path: Path) -> None:
    def deep(rank: int, *, world_size: int, **rollout: int) -> str:
        config = scaling_setup.make_config(
            scaling_setup.write_model(tmp_path, scaling_setup.TINY),
            model={"precision": "bf16"},
            parallel=scaling_setup.parallel_of(2, 1),
            data={"max_prompt_tokens": 17},
            rollout={"max_response_tokens": 48, **rollout},
        )
        output = io.StringIO()
        console = Console(markup=False, file=output)
        print_deep_dry_run(
            config, rank=rank, world_size=world_size, ranks_per_node=4, console=console
        )
        return output.getvalue()

    alone = deep(1, world_size=4)
    beside = deep(1, world_size=12, generation_nodes=2)
    assert "Rank 1 of 4 that train: tensor 2 x pipeline 1 x data 2" in alone
    # The same shapes, bytes and collectives.
    assert alone == beside
    with pytest.raises(ConfigError, match=mentions("--rank 4/12", "must be below", 4)):
        deep(4, world_size=12, generation_nodes=2)
