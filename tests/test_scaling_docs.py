"""The tables and the example of docs/scaling.md are what the planner says now."""

from pathlib import Path

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.scaling.anchors import ANCHORS
from gapo_megatron.scaling.calibration import seconds
from gapo_megatron.scaling.efficiency import Efficiency
from gapo_megatron.scaling.planner import gib, plan
from gapo_megatron.scaling.workload import default_workload
from tests.scaling_setup import H200, hf, write_model
from tests.test_convert_models import CONFIGS
from tools import plan as tool

CONFIG = "configs/qwen_math_1_5b/gapo.toml"
TEXT = Path("docs/scaling.md").read_text(encoding="utf-8")
THOUSAND = ["batch.rollout_prompts=8192", "batch.minibatch_prompts=2048"]
EXAMPLES = [
    ("1.5B", "Qwen2.5-1.5B", 1, []),
    ("7B", "Qwen2.5-7B", 2, []),
    ("32B", "Qwen2.5-32B", 4, []),
    ("72B", "Qwen2.5-72B", 8, []),
    ("72B", "Qwen2.5-72B", 128, THOUSAND),
]


def table_with(heading: str) -> list[list[str]]:
    """Cells of the rows below a heading row of the document."""
    lines = TEXT[TEXT.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_published_step_times_are_compared_as_printed():
    expected = []
    for anchor in ANCHORS:
        predicted = anchor.predict(Efficiency())
        for stage, published in anchor.published.items():
            low_high, value = anchor.published_range, seconds(predicted, stage)
            expected.append(
                [
                    anchor.name if stage == "total" else f"- {stage.replace('_', ' ')}",
                    f"{low_high[0]:g}-{low_high[1]:g}" if low_high else f"{published:g}",
                    f"{value:.0f}",
                    f"{value / published:.2f}",
                ]
            )
    assert table_with("| run | published, s |") == expected


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_are_the_first_rows(number):
    name, model, nodes, overrides = EXAMPLES[number]
    config = load_config(CONFIG, overrides)
    found = plan(
        hf(model),
        config,
        num_nodes=nodes,
        gpu=H200,
        workload=default_workload(config, mean_prompt_tokens=150, mean_response_tokens=900),
        efficiency=Efficiency(),
    )
    best = found.ranked[0]
    layout, times = best.layout, best.times
    assert table_with("| model | GPUs |")[number] == [
        name,
        f"{found.num_gpus:,}",
        *map(str, (layout.tp_size, layout.pp_size, layout.dp_size)),
        layout.recompute,
        str(layout.rollout_tp_size),
        f"{best.max_tokens_per_microbatch:,}",
        *(f"{one:.1f}" for one in (times.generation_s, times.old_log_probs_s)),
        *(f"{one:.1f}" for one in (times.update_s, times.sync_s)),
        f"{times.total_s:.0f}",
        f"{gib(best.memory.training):.0f}",
        f"{gib(best.memory.generating):.0f}",
    ]


def test_the_example_is_what_the_tool_prints(tmp_path, capsys):
    command = [CONFIG, f"model.hf_dir={write_model(tmp_path, CONFIGS['Qwen2.5-32B'])}"]
    command += ["--nodes", "4", "--mean-prompt-tokens", "150"]
    assert tool.main([*command, "--mean-response-tokens", "900", "--top", "3"]) == 0
    shown = TEXT[TEXT.index("A step: 256 prompts of 150") :].split("\n```")[0]
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed] == shown.splitlines()
