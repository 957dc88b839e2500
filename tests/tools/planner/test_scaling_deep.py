"""One rank without data: the same bytes as with data, and collectives by hand."""

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gapo_megatron import train
from gapo_megatron.config import Config, load_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.learn.update import update
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import Policy
from gapo_megatron.policy.model import read_hf_config
from gapo_tools.demonstration.demo_task import write_tokenizer
from gapo_tools.planner import deep_dry_run
from gapo_tools.planner.activations import Kernels, kept_activations, num_in_flight
from gapo_tools.planner.deep_dry_run import print_deep_dry_run, step_one_rank
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import step_bytes
from gapo_tools.planner.no_data import KeptForBackward, NoData, fake_groups, memory_of_a_gpu
from gapo_tools.planner.state import state_bytes
from tests.formats.test_convert_models import CONFIGS
from tests.scaling_setup import (
    SIX_LAYERS,
    SIX_LAYERS_EXPERTS,
    TINY,
    TINY_EXPERTS,
    TWELVE_LAYERS,
    UNTIED,
    WIDE,
    make_config,
    parallel_of,
    read_model,
    write_model,
)

# Of other layers: windows, norms behind them, norms on both sides.
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": TINY | {"model_type": "phi3", "sliding_window": 16},
    "olmo2": TINY | {"model_type": "olmo2"},
    "gemma3_text": TINY | {"model_type": "gemma3_text", "sliding_window": 16},
}


@pytest.fixture(autouse=True)
def _a_cpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all CPUs the one that multiplies float32 copies, which no GPU has."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


def make(folder: Path, fields: dict[str, Any], parallel: dict[str, Any], **model: Any) -> Any:
    # Sequences of 64 tokens fill 256 evenly.
    return make_config(
        write_model(folder, fields),
        model={"precision": "bf16", **model},
        parallel=parallel,
        data={"max_prompt_tokens": 17},
        rollout={"max_response_tokens": 48},
    )


def in_second_stage(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.system) for case in cases]


@pytest.mark.parametrize(("recompute", "precision"), [("full", "bf16"), ("none", "fp16")])
def test_without_data_autograd_keeps_as_much_as_with(
    tmp_path: Path, recompute: str, precision: str
) -> None:
    config = make(tmp_path, TINY, parallel_of(2, 1), recompute=recompute, precision=precision)
    settings = config.optimizer.model_copy(update={"implementation": "apex"})  # not here
    named = config.model_copy(update={"optimizer": settings})
    found = step_one_rank(named, rank=1, world_size=2)
    with fake_groups(config.parallel, rank=1, world_size=2) as groups:
        policy = Policy.build(config, groups, "cpu")
        with torch.no_grad():
            for parameter in policy.stages[0].parameters():
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
        microbatch = deep_dry_run._full_microbatch(config, policy)
        kept = KeptForBackward(besides=policy.stages[0].parameters())
        with memory_of_a_gpu(), kept:
            update(policy, [microbatch], deep_dry_run._loss)
    # Real: integers too, a few bytes of every token.
    assert found.kept <= kept.peak_bytes <= 1.02 * found.kept
    assert found.peak > found.kept


@pytest.mark.parametrize(
    ("fields", "parallel", "world_size", "rank"),
    [
        (TINY, parallel_of(2, 4, sp=True), 16, 6),
        (TINY_EXPERTS, parallel_of(2, 2, 4, sp=True), 8, 3),
        (TINY, parallel_of(2, 2, cp=2, sp=True), 16, 6),
        (SIX_LAYERS, parallel_of(2, 3, sp=True, vpp=2), 12, 7),
        (SIX_LAYERS, parallel_of(1, 2, first=4, vpp=2), 2, 1),
        *((fields, parallel_of(2, 2, sp=True), 4, 1) for fields in OTHERS.values()),
        *in_second_stage(
            (TINY, parallel_of(2, 4, sp=True), 16, 15),
            (TINY_EXPERTS, parallel_of(1, 1, 2), 2, 1),
            (TINY, parallel_of(1, 1, cp=2), 4, 3),
            (SIX_LAYERS, parallel_of(2, 3, sp=True, vpp=2), 12, 8),
            (TINY_EXPERTS, parallel_of(2, 2, 2, sp=True, vpp=2), 8, 3),
            (TINY, parallel_of(1, 2, cp=2, last=1), 4, 0),
            (SIX_LAYERS, parallel_of(1, 2, first=4, vpp=2), 2, 0),
            (TWELVE_LAYERS, parallel_of(1, 4, vpp=3), 4, 3),
            (SIX_LAYERS_EXPERTS, parallel_of(1, 2, 2, vpp=3), 4, 1),
            (TWELVE_LAYERS, parallel_of(1, 3, vpp=2, first=6, last=2), 3, 1),
        ),
    ],
)
def test_bytes_are_the_predicted_ones(
    tmp_path: Path, fields: dict[str, Any], parallel: dict[str, Any], world_size: int, rank: int
) -> None:
    config = make(tmp_path, fields, parallel)
    hf_config, layout = read_model(tmp_path, fields), Layout.of(config, world_size=world_size)
    found = step_one_rank(config, rank=rank, world_size=world_size)
    stage = rank // layout.ranks_per_stage
    of_rank = {
        "stage": stage,
        "num_microbatches": found.num_microbatches,
        "kernels": Kernels.PADDED,
    }
    predicted = kept_activations(hf_config, config, layout, **of_rank).most
    assert predicted == pytest.approx(found.kept, rel=0.05)
    # What works besides is an estimate, here never too low, and high by a block of the head that is
    # not all at once: a quarter where the whole model is a tenth of a MiB.
    peak = step_bytes(hf_config, config, layout, **of_rank).step
    assert 1.0 <= peak / found.peak <= 1.3
    assert found.num_microbatches == layout.pp_size * min(layout.vpp_size, 2)


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [
        (parallel_of(1, 4, vpp=3), 1),
        *in_second_stage(
            (parallel_of(1, 4), 3),
            (parallel_of(1, 4, vpp=3), 0),
            (parallel_of(1, 4, vpp=3), 3),
        ),
    ],
)
def test_stages_that_compute_all_again(tmp_path: Path, parallel: dict[str, Any], rank: int) -> None:
    config = make(tmp_path, TWELVE_LAYERS, parallel, recompute="full")
    hf_config, layout = read_model(tmp_path, TWELVE_LAYERS), Layout.of(config, world_size=4)
    found = step_one_rank(config, rank=rank, world_size=4)
    of_rank = {"stage": rank, "num_microbatches": found.num_microbatches, "kernels": Kernels.PADDED}
    # Rotary tables are there for every micro-batch in flight; autograd sees those of some.
    rotary = 256 * 2 * 2 * 10
    in_flight = num_in_flight(layout, stage=rank, num_microbatches=found.num_microbatches)
    kept = kept_activations(hf_config, config, layout, **of_rank).most
    assert 0.95 * (kept - (in_flight - 1) * rotary) <= found.kept <= 1.05 * kept
    peak = step_bytes(hf_config, config, layout, **of_rank).step
    assert 1.0 <= peak / found.peak <= 1.3


def test_virtual_stages_have_the_same_weights(tmp_path: Path) -> None:
    """Layers 1 and 3 in buffers of their own, and more sent than of two stages."""
    rank, virtual = 3, parallel_of(1, 2, vpp=2)
    found = step_one_rank(make(tmp_path, UNTIED, virtual), rank=rank, world_size=4)
    plain = step_one_rank(make(tmp_path, UNTIED, parallel_of(1, 2)), rank=rank, world_size=4)
    assert found.num_microbatches == 4
    assert list(found.shapes.values()) == list(plain.shapes.values())
    assert {name.split(":")[0] for name in found.shapes} == {"stage 0", "stage 1"}
    assert 0 <= found.weights - plain.weights < 2 * 2 * 128 * 2  # padding of one more buffer
    # Megatron-core sends to and fro over different groups.
    sent, sent_plain = (
        sum(traffic.num_bytes for (kind, _), traffic in one.traffic.items() if kind == "send")
        for one in (found, plain)
    )
    assert sent / found.num_microbatches > 2 * sent_plain / plain.num_microbatches


def printed(config: Config, *, rank: int, world_size: int) -> str:
    output = io.StringIO()
    print_deep_dry_run(
        config, rank=rank, world_size=world_size, console=Console(markup=False, file=output)
    )
    return output.getvalue()


def assert_predicted(text: str, part: str) -> None:
    """The table of memory has a ratio of nearly 1."""
    (line,) = [line for line in text.splitlines() if f"│ {part} " in line]
    assert float(line.split("│")[4]) == pytest.approx(1, abs=0.1)


def test_unequal_stages_are_compared_as_others(tmp_path: Path) -> None:
    config = make(tmp_path, TINY, parallel_of(1, 2, last=1))
    assert_predicted(printed(config, rank=0, world_size=2), "weights")


@pytest.mark.parametrize("overlap", [False, True])
def test_collectives_by_hand(tmp_path: Path, overlap: bool) -> None:
    parallel = parallel_of(2, 2, sp=True) | {"overlap_grad_reduce": overlap}
    config = make(tmp_path, TINY, parallel)
    found = step_one_rank(config, rank=3, world_size=8)  # first stage, two of each kind
    traffic = {key: (one.num_calls, one.num_bytes) for key, one in found.traffic.items()}
    # Two buckets: the shared embedding has its own.
    data = "DATA_PARALLEL_GROUP_WITH_CP"
    assert traffic["reduce-scatter", data] == (2, found.gradients)
    assert traffic["all-gather", data] == (2, found.weights)
    # Of each micro-batch hidden states, there and back; their shapes are known from the plan.
    hidden = 256 // 2 * 40 * 2
    pipeline = "PIPELINE_MODEL_PARALLEL_GROUP"
    assert traffic["send", pipeline] == (2, 2 * hidden)
    assert traffic["receive", pipeline] == (2, 2 * hidden)
    # Of each micro-batch: the embedding; of each of two layers, attention and MLP forward, and
    # their inputs' gradients.
    tensor = "TENSOR_MODEL_PARALLEL_GROUP"
    num_scatters = 2 * (1 + 2 * 4)
    assert traffic["reduce-scatter", tensor] == (num_scatters, num_scatters * 2 * hidden)


OVERLAP = {"overlap_grad_reduce": True}
BIG = [
    ("Qwen2.5-7B", parallel_of(4, 4, sp=True), 32, 3),
    ("Qwen3-30B-A3B", parallel_of(4, 12, 16, sp=True), 192, 191),
    *in_second_stage(
        ("Qwen2.5-72B", parallel_of(8, 8, sp=True), 128, 37),
        ("Qwen2.5-7B", parallel_of(2, 2, sp=True) | OVERLAP, 24, 3),
    ),
]


@pytest.mark.parametrize(("name", "parallel", "world_size", "rank"), BIG)
def test_state_of_published_models(
    tmp_path: Path, name: str, parallel: dict[str, Any], world_size: int, rank: int
) -> None:
    config = make(tmp_path, CONFIGS[name], parallel)
    layout = Layout.of(config, world_size=world_size)
    groups = fake_groups(config.parallel, rank=rank, world_size=world_size)
    with groups as own, NoData(), deep_dry_run._without_moving():
        found = deep_dry_run.allocated_bytes(Policy.build(config, own, "cpu"))
    rules = rules_for(read_model(tmp_path, CONFIGS[name]))
    stage = rank // layout.ranks_per_stage
    assert state_bytes(rules, config, layout)[stage] == pytest.approx(found, rel=1e-3)


def test_our_configs_take_a_step(tmp_path: Path) -> None:
    """One of the published layers, all are alike, and short sequences: seconds, not minutes."""
    folder = write_model(tmp_path, CONFIGS["Qwen2.5-1.5B"] | {"num_hidden_layers": 1})
    short = ["data.max_prompt_tokens=1024", "rollout.max_response_tokens=3072"]
    short += ["batch.max_tokens_per_microbatch=4096"]
    config = load_config("configs/qwen_math_1_5b/base.toml", [f"model.hf_dir={folder}", *short])
    hf_config, layout = read_hf_config(folder), Layout.of(config, world_size=8)
    found = step_one_rank(config, rank=7, world_size=8)
    state = found.weights, found.gradients, found.optimizer
    (predicted,) = state_bytes(rules_for(hf_config), config, layout)
    assert predicted == pytest.approx(state, rel=1e-3)
    peak = step_bytes(
        hf_config, config, layout, stage=0, num_microbatches=1, kernels=Kernels.PADDED
    ).step
    assert peak == pytest.approx(found.peak, rel=0.25)


def test_fp8_and_triton_are_run_as_what_a_cpu_has(tmp_path: Path) -> None:
    config = make(tmp_path, WIDE, parallel_of(1, 1), precision="fp8", head="triton")
    text = printed(config, rank=0, world_size=1)
    assert "bf16" in text
    assert_predicted(text, "optimizer")


def test_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        print_deep_dry_run(make(tmp_path, TINY, parallel_of(1, 3)), rank=0, world_size=3)


def write_toml(folder: Path) -> Path:
    write_model(folder / "model", TINY | {"hidden_size": 128})  # 32 per head: vLLM's on a CPU
    sections = {
        "run": {"output_dir": str(folder / "run"), "num_steps": 1},
        "model": {"hf_dir": str(folder / "model")},
        "data": {"train_path": str(folder / "train.jsonl"), "max_prompt_tokens": 17},
        "rollout": {"max_response_tokens": 48},
        "reward": {"kind": "exact"},
    }
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = folder / "config.toml"
    path.write_text("\n".join(lines))
    return path


def test_command_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    words = [str(write_toml(tmp_path)), "batch.max_tokens_per_microbatch=256"]
    write_tokenizer(["1+2=3"], tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 1024)

    def said(*kind: str, more: Sequence[str] = ()) -> str:
        given = [*words, *kind, *more]
        monkeypatch.setattr(sys, "argv", ["train", *given])
        train.main()
        return capsys.readouterr().out

    text = said("--dry-run")
    assert "1 = tensor 1 x pipeline 1 x data 1" in text and "Rank" not in text
    text = said("--dry-run", more=["--rank", "2/4"])
    assert "4 = tensor 1 x pipeline 1 x data 4" in text and "Rank" not in text
    text = said("--dry-run", "deep", more=["--rank", "2/4"])
    assert (
        "World-size arithmetic" in text
        and "Rank 2 of 4 that train: tensor 1 x pipeline 1 x data 4" in text
    )


def test_every_form_of_the_dry_run_that_help_prints_is_taken(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    with pytest.raises(SystemExit):
        train.parse_arguments()
    (kinds,) = re.findall(r"\[--dry-run \[\{([a-z,]+)\}\]\]", capsys.readouterr().out)
    assert {"plain", "data", "settings", "deep"} == {*kinds.split(",")}
    for kind in kinds.split(","):
        for words in (
            ["c.toml", "--dry-run", kind, "a.b=1"],
            [f"--dry-run={kind}", "c.toml", "a.b=1"],
        ):
            monkeypatch.setattr(sys, "argv", ["train", *words])
            found = train.parse_arguments()
            assert (found.config, found.overrides, found.dry_run) == ("c.toml", ["a.b=1"], kind)


@pytest.mark.parametrize("words", [["--dry-run=deep", "--rank=4/4"], ["--rank=0/4"]])
def test_rank_that_is_none(monkeypatch: Any, capsys: Any, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "config.toml", *words])
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code == 2
    assert "--rank" in capsys.readouterr().err
