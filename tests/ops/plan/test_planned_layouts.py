"""Planned layouts: as config files (`tools/plan.py --write`), and in docs/planned_layouts.md.

That page is the only place where predictions of the planner are written down.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import planned
from benchmarks.planned import LAYOUTS, nodes_of
from gapo_megatron.config import load_config
from gapo_megatron.config.roles import flat
from gapo_megatron.errors import ConfigError
from gapo_megatron.ops.plan.hardware import GPUS
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.planner import quickest_with_room, write_layout
from tests.messages import mentions
from tools import plan as tool

pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout
BASE = Path("configs/llama_3_1_8b/base.toml")
LONGER = ["rollout.max_response_tokens=24576", "batch.max_tokens_per_microbatch=26624"]


def test_the_tables_are_what_the_planner_says_now(capsys):
    planned.main()
    written = Path("docs/planned_layouts.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == written, f"run {planned.COMMAND}"


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_layout_of_configs_is_as_it_would_be_written_now(path, tmp_path):
    """Whichever layout it is: the planner's constants are no part of this."""
    config, gpu = load_config(path), GPUS[path.stem.partition("_")[0]]
    candidate = SimpleNamespace(
        layout=Layout.of(config, world_size=gpu.gpus_per_node * nodes_of(path)),
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        settings=(),
    )
    settings = [f"rollout.max_response_tokens={config.rollout.max_response_tokens}"]
    settings += [f"batch.max_tokens_per_microbatch={config.batch.max_tokens_per_microbatch}"]
    target = tmp_path / path.name
    write_layout(candidate, target, gpu=gpu, base=path.parent / "base.toml", settings=settings)
    head, base, *others = target.read_text().splitlines()
    assert Path(tmp_path, json.loads(base.removeprefix("base = "))).samefile(
        path.parent / "base.toml"
    )
    assert [head, 'base = "base.toml"', *others] == path.read_text().splitlines()


def test_a_plan_is_written_as_a_config_over_the_planned_one(tmp_path, capsys):
    """The best layout, and what the command line said; nothing else changes."""
    path = tmp_path / "two_nodes.toml"
    command = [str(BASE), *LONGER, "--gpu", "h100", "--nodes", "2", "--json", "--write", str(path)]
    assert tool.main(command) == 0
    best, *_ = json.loads(capsys.readouterr().out)["layouts"]
    wanted = [*LONGER, *best["overrides"], "run.output_dir=runs/llama_3_1_8b/two_nodes"]
    assert flat(load_config(path)) == flat(load_config(BASE, wanted))
    assert nodes_of(path) == 2
    # Of its own files it writes another; a user's stays as it is.
    assert tool.main([*command, "run.output_dir=runs/mine"]) == 0
    assert load_config(path).run.output_dir == "runs/mine"
    path.write_text("# mine\n")
    assert tool.main(command) == 1
    assert path.read_text() == "# mine\n"


def test_what_is_written_leaves_room():
    gpu = GPUS["h100"]

    def candidate(training, generating):
        sizes = {"training": training, "generating": generating}
        return SimpleNamespace(
            memory=SimpleNamespace(**{k: int(v * gpu.memory_bytes) for k, v in sizes.items()})
        )

    tight = [candidate(0.96, 0.5), candidate(0.5, 0.96)]
    fits, slower = candidate(0.94, 0.94), candidate(0.1, 0.1)
    plan = SimpleNamespace(gpu=gpu, everything=[*tight, fits, slower])
    assert quickest_with_room(plan) is fits
    plan.everything = tight
    with pytest.raises(ConfigError, match=mentions("h100", "nodes")):
        quickest_with_room(plan)


def test_stages_of_a_base_that_a_file_cannot_make_equal_are_named(tmp_path):
    name = "parallel.num_layers_in_last_pipeline_stage"
    base = tmp_path / "base.toml"
    text = (
        f"base = {json.dumps(str(BASE.absolute()))}\n[parallel]\npipeline_model_parallel_size = 2\n"
    )
    base.write_text(f"{text}num_layers_in_last_pipeline_stage = 12\n")
    config = load_config(BASE)
    layout = replace(Layout.of(config, world_size=8), tp_size=2, dp_size=4)
    candidate = SimpleNamespace(layout=layout, max_tokens_per_microbatch=10_240, settings=())
    with pytest.raises(ConfigError, match=mentions(base, name)):
        write_layout(candidate, tmp_path / "new.toml", gpu=GPUS["h100"], base=base, settings=[])
    assert not (tmp_path / "new.toml").exists()
