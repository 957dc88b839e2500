"""The dry run: right numbers, no GPU, and no silence about what it could not compute."""

import errno
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gapo_megatron.config import Config, load_config, parse_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats import manifest
from gapo_megatron.models.cpu_engine import is_cpu_build
from gapo_megatron.run.early_checks import check_before_imports
from gapo_tools.dry_run.command import print_dry_run, why_not_run
from gapo_tools.dry_run.data import look_at_data
from tests.chat_templates import put_family
from tests.draft_setup import write_draft
from tests.messages import mentions

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout


def make_config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"output_dir": "runs/x", "num_steps": 10},
        "model": {"hf_dir": "/nowhere"},
        "data": {"train_path": "/nowhere.jsonl", "max_prompt_tokens": 40},
        "batch": {"rollout_prompts": 32, "minibatch_prompts": 8, "max_tokens_per_microbatch": 210},
        "rollout": {"max_response_tokens": 60},
        "reward": {"kind": "exact"},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree, source="test")


def text_of(config: Config, *, world_size: int = 1, ranks_per_node: int | None = None) -> str:
    output = io.StringIO()
    print_dry_run(
        config,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        console=Console(markup=False, file=output, width=120),
    )
    return output.getvalue()


def write_model(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("sections", "world_size", "names"),
    [
        (
            {"parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}},
            8,
            ["parallel.tensor_model_parallel_size (2)", "world size (8)"],
        ),
        ({"rollout": {"tensor_parallel_size": 3}}, 8, ["rollout.tensor_parallel_size (3)"]),
        # Of the model.
        ({"parallel": {"tensor_model_parallel_size": 4}}, 12, ["(4)", "num_key_value_heads (2)"]),
        ({"parallel": {"pipeline_model_parallel_size": 3}}, 12, ["(3)", "num_hidden_layers (4)"]),
        ({"parallel": {"expert_model_parallel_size": 2}}, 12, ["(2)", "no experts"]),
        (
            {"model": {"precision": "fp8", "fp8_recipe": "mxfp8"}},
            1,
            ["multiples of 32", "linear_fc2.weight is 32 x 48"],
        ),
    ],
)
def test_sizes_that_do_not_divide(
    tmp_path: Path, sections: dict[str, Any], world_size: int, names: list[str]
) -> None:
    model = {"hf_dir": write_model(tmp_path / "m")} | sections.pop("model", {})
    with pytest.raises(ConfigError) as caught:
        text_of(make_config(model=model, **sections), world_size=world_size)
    assert all(name in str(caught.value) for name in names), caught.value


def test_absences_and_the_sandbox_are_said() -> None:
    """Paths with brackets are no markup."""
    data = {"train_path": "/nowhere/[/x].jsonl"}
    reward = {"kind": "code", "sandbox": "apptainer:/[/x].sif"}
    text = text_of(make_config(data=data, reward=reward))
    assert "/nowhere does not exist" in text
    assert "/nowhere/[/x].jsonl does not exist" in text
    assert re.search(r"sandbox of programs\W+apptainer:/\[/x\].sif", text)
    assert "sandbox of programs" not in text_of(make_config())


def test_data_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=mentions("data.train_path", rows)):
        text_of(make_config(data={"train_path": str(rows)}))


def test_a_megatron_folder_is_checked_where_it_is(tmp_path: Path) -> None:
    model = {"hf_dir": write_model(tmp_path / "m"), "megatron_dir": "/nowhere"}
    assert "/nowhere does not exist, so it is not checked" in text_of(make_config(model=model))
    model["megatron_dir"] = str(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.megatron_dir .*holds no checkpoint"):
        text_of(make_config(model=model))


def test_it_says_what_drafts_take(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", vocab_size=5)
    rollout = {"draft": "eagle3", "draft_hf_dir": str(folder)}
    size = (folder / "model.safetensors").stat().st_size / 2**20
    assert re.search(rf"eagle3, at most 4 .*{size:,.1f} MiB", text_of(make_config(rollout=rollout)))
    config = make_config(model={"hf_dir": write_model(tmp_path)}, rollout=rollout)
    assert any(
        "rollout.draft_hf_dir" in line and "vocab_size" in line for line in why_not_run(config)
    )
    missing = {"draft": "eagle3", "draft_hf_dir": str(tmp_path / "none")}
    found = why_not_run(make_config(rollout=missing))
    assert sum("rollout.draft_hf_dir" in line for line in found) == 1


def test_a_reward_that_cannot_run_is_said() -> None:
    found = "".join(why_not_run(make_config(reward={"kind": "code", "python": "/no/python"})))
    assert "reward.sandbox ('bubblewrap'), reward.python ('/no/python')" in found
    found = "".join(
        why_not_run(make_config(reward={"kind": "code", "sandbox": "https://127.0.0.1:1"}))
    )
    assert "reward.sandbox ('https://127.0.0.1:1'): programs cannot be" in found
    assert not any("reward" in one for one in why_not_run(make_config()))


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"kind": "tests.two_turn:TwoTurns"}, "'TwoTurn'"),
        ({"kind": "tests.two_turn:TwoTurn", "settings": {"gven": [1]}}, "'gven'"),
        ({"kind": "tools", "settings": {"tols": []}}, "'tols'"),
    ],
)
def test_an_environment_that_cannot_run_is_said(environment: dict[str, Any], named: str) -> None:
    found = why_not_run(make_config(environment=environment))
    assert any(re.search(mentions("environment.kind", named), one) for one in found), found


def test_every_input_that_the_run_reads_is_looked_for(tmp_path: Path) -> None:
    """The run would stop at it: with the setting, and the path."""
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    given: dict[str, Any] = {
        "data": {"train_path": str(data), "eval_path": str(tmp_path / "eval.jsonl")},
        "model": {"hf_dir": str(model)},
    }
    found = why_not_run(make_config(**given))
    assert [one.split()[0] for one in found] == ["model.hf_dir", "data.train_path"]
    evaluated = make_config(**given, evaluation={"every_steps": 5})
    assert any(one.startswith("data.eval_path") for one in why_not_run(evaluated))
    given["data"]["chat_template"] = True
    write_model(model, hidden_size=128)  # 32 per head, which vLLM serves on a CPU too
    data.write_text("")
    (found_template,) = why_not_run(make_config(**given))
    assert found_template.startswith("data.chat_template") and str(model) in found_template
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert why_not_run(make_config(**given)) == []
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    write_model(model, **kind, **experts, hidden_size=128, head_dim=32, tie_word_embeddings=False)
    found = why_not_run(make_config(**given, objective={"routing_replay": "rollout"}))
    assert [one.split()[0] for one in found] == ["objective.routing_replay"] * is_cpu_build()


@pytest.mark.parametrize(
    ("sections", "is_inert"),
    [
        ({}, True),
        ({"objective": {"method": "m2po"}}, True),
        ({"batch": {"rollout_prompts": 16}}, False),
        ({"batch": {"partial_rollouts": True, "oversampling": 1.5}}, False),
        (
            {
                "batch": {"partial_rollouts": True, "oversampling": 1.5},
                "rollout": {"generation_ranks": 1},
            },
            True,
        ),
        ({"objective": {"old_log_probs": "rollout"}}, False),
    ],
)
def test_a_clip_that_cannot_act_is_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sections: dict[str, dict[str, Any]],
    is_inert: bool,
) -> None:
    """In the dry run and where training starts."""
    model = write_model(tmp_path / "model", hidden_size=128)
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(tmp_path / "run")},
        "model": {"hf_dir": model, "megatron_dir": str(tmp_path), "precision": "fp32"},
        "batch": {"rollout_prompts": 8},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    config = make_config(**tree)
    named = re.compile(mentions("batch.minibatch_prompts (8)", "batch.rollout_prompts"))
    check_before_imports(config)
    assert bool(named.search(caplog.text)) == is_inert
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"megatron_dir": ""})}
    )
    text = text_of(config, world_size=1 + config.rollout.generation_ranks)
    assert bool(named.search(" ".join(text.split()))) == is_inert


def test_steps_per_epoch_come_from_the_file(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n" * 160 + "\n")  # a blank line is no problem
    config = make_config(data={"train_path": str(data)})
    assert "5.00 (160 prompts), so 2.00 epochs" in text_of(config)
    data.write_text("\n")
    with pytest.raises(ConfigError, match=r"train\.jsonl\) contains no problems"):
        text_of(config)


def test_every_source_shows_its_prompts_and_epochs(tmp_path: Path) -> None:
    """10 steps of 32 prompts: the first source has all of 5, and a quarter of the others."""
    (tmp_path / "easy.jsonl").write_text("{}\n" * 100)
    (tmp_path / "hard.json").write_text(json.dumps([{}] * 60))
    tables = [
        {"name": "easy", "path": str(tmp_path / "easy.jsonl")},
        {"name": "hard", "path": str(tmp_path / "hard.json"), "weight": 3.0, "first_step": 5},
        {"name": "later", "path": str(tmp_path / "later.jsonl"), "first_step": 10},
    ]
    given: dict[str, Any] = {"data": {"train_path": "", "source": tables}}
    text = " ".join(text_of(make_config(**given)).split())
    for shown in (
        "source easy 20 prompts per step in 10 steps; steps per epoch: 5.00 (100 prompts), so 2.00",
        "source hard 24 prompts per step in 5 steps; steps per epoch: 2.50 (60 prompts), so 2.00",
        "source later not used before step 10",
    ):
        assert shown in re.sub("[^ -~]+ ?", "", text)
    missing = [one for one in why_not_run(make_config(**given)) if one.startswith("data.")]
    assert missing == [f"data.source.later.path ({tmp_path}/later.jsonl) does not exist"]


def test_too_few_positions_are_pointed_out(tmp_path: Path) -> None:
    short = write_model(tmp_path / "short", max_position_embeddings=99)
    enough = write_model(tmp_path / "enough", max_position_embeddings=100)
    assert "= 100 exceeds the model's max_position_embeddings (99)" in text_of(
        make_config(model={"hf_dir": short})
    )
    assert "max_position_embeddings" not in text_of(make_config(model={"hf_dir": enough}))


def test_table_shows_whole_and_local_shapes(tmp_path: Path) -> None:
    config = make_config(
        model={"hf_dir": write_model(tmp_path / "m")},
        parallel={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    )
    lines = text_of(config, world_size=8).splitlines()
    (qkv,) = [line for line in lines if "linear_qkv.weight" in line]
    assert "64 x 32" in qkv
    assert "32 x 32" in qkv
    assert "2 on each" in qkv


def test_a_branch_is_told_and_checked(tmp_path: Path) -> None:
    old = make_config(run={"output_dir": str(tmp_path / "old")}, objective={"method": "gspo"})
    folder = tmp_path / "old/checkpoints"
    folder.mkdir(parents=True)
    given = {"branch_from": str(folder / "step_4")}
    config = make_config(run={"output_dir": str(tmp_path / "new")}, checkpoint=given)
    with pytest.raises(ConfigError, match="does not exist; checkpoints of that run: none"):
        text_of(config)
    manifest.step_dir(folder, 4).mkdir()
    document = manifest.Manifest(4, {}, old.model_dump(mode="json"), {}, "0.19.2", files={})
    manifest.write_manifest(manifest.step_dir(folder, 4), document)
    text = " ".join(text_of(config).split())
    assert f"{tmp_path}/old, step_00000004" in text and document.sha256[:12] in text
    assert "objective.method = 'gapo' (was 'gspo')" in text
    with pytest.raises(ConfigError, match=r"run\.seed is 0 there and 3 here"):
        text_of(make_config(run={"output_dir": "unused", "seed": 3}, checkpoint=given))
    # Begun, and then the branch point may be gone.
    manifest.publish(manifest.step_dir(folder, 4), tmp_path / "aside")
    own = manifest.step_dir(tmp_path / "new/checkpoints", 4)
    own.mkdir(parents=True)
    manifest.write_manifest(
        own, manifest.Manifest(4, {}, config.model_dump(mode="json"), {}, "0.19.2", files={})
    )
    assert "resumes from its own checkpoints" in " ".join(text_of(config).split())
    elsewhere = {"branch_from": str(tmp_path / "nowhere/checkpoints/step_4")}
    text = text_of(make_config(checkpoint=elsewhere))
    assert "Branch: " in text and "is not checked" in " ".join(text.split())
    assert "Branch:" not in text_of(make_config())


def test_which_gpus_the_run_fits_is_said(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/ds_r1_1_5b/gapo.toml", ["model.recompute=none"])
    fits, _, rest = text_of(config, world_size=8).partition("to fit: ")[2].partition("NOT")
    assert "h200 (" in fits and "h100 (" in rest and "a100 (" in rest
    # The config itself fits both; an A100 lacks fp8.
    fp8 = ["model.precision=fp8", "model.fp8_recipe=tensorwise"]
    config = load_config(ROOT / "configs/ds_r1_1_5b/gapo.toml", fp8)
    fits, _, rest = text_of(config, world_size=8).partition("to fit: ")[2].partition("NOT")
    assert "h100 (" in fits and "a100 (" in rest and "capability 8.0" not in fits


def test_sequences_beyond_yarns_positions_are_a_reason_not_to_run() -> None:
    """gpt-oss has 32 x 4096."""
    model, batch = {"hf_dir": "gpt-oss-20b"}, {"max_tokens_per_microbatch": 2**18}
    for num_tokens, is_named in ((2**17 - 40, False), (2**17 - 39, True)):
        config = make_config(model=model, batch=batch, rollout={"max_response_tokens": num_tokens})
        assert any(f"({2**17 + 1})" in reason for reason in why_not_run(config)) == is_named


def test_what_ends_a_response_is_said(tmp_path: Path) -> None:
    model = put_family(tmp_path / "model", "qwen3", eos_token_id=7)
    config = make_config(model={"hf_dir": str(model)}, data={"chat_template": True})
    ends = mentions("<|im_end|>", "chat template, tokenizer", 7, "config.json")
    seen = look_at_data(config)
    assert any(re.search(ends, note) for note in seen.notes) and not seen.warnings
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}\nUser:")
    assert any("User:" in warning for warning in look_at_data(config).warnings)


def test_a_system_prompt_that_an_agent_would_never_send_is_refused(tmp_path: Path) -> None:
    """By the dry run, and where training starts."""
    (tmp_path / "agent.py").write_text("def solve(session): ...\n")
    config = make_config(
        run={"output_dir": str(tmp_path / "run")},
        data={"chat_template": True, "system_prompt": "be brief"},
        environment={"kind": f"{tmp_path}/agent.py:solve"},
    )
    named = mentions("data.system_prompt", "be brief", "agent.py:solve")
    assert any(re.search(named, one) for one in why_not_run(config))
    with pytest.raises(ConfigError, match=named):
        check_before_imports(config)
