"""What a resume compares before any model is built, and the record of changed settings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from gapo_megatron.checkpoint import check_resume
from gapo_megatron.checkpoint.changes import record_changes
from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.config import Config, parse_config
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.formats import manifest
from gapo_megatron.io.run_folder import check_writable, checkpoints_dir, read_changes
from tests.branch_setup import make_config, publish
from tests.damage import put, sign_document
from tests.messages import mentions

OURS = make_config(Path("unused"), checkpoint={"branch_from": ""})


def make_checkpoint(
    folder: Path, step: int, *, model: dict | None = None, config: Config = OURS
) -> Path:
    return publish(folder, step, config=config, model=model or {"hidden_size": 8})


def test_check_writable(tmp_path):
    check_writable(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "run", "/proc/run"):
        with pytest.raises(ConfigError) as caught:
            check_writable(path)
        assert f"run.output_dir ({str(path)!r})" in str(caught.value)


def test_check_resume_names_the_fields_that_differ(tmp_path):
    def qwen2(**fields):
        return Qwen2Config(architectures=["Qwen2ForCausalLM"], **fields)

    ours = qwen2(hidden_size=64)
    check_resume(tmp_path, ours, OURS)  # no checkpoint: nothing to disagree with
    make_checkpoint(checkpoints_dir(tmp_path), 1, model=model_identity(ours))
    check_resume(tmp_path, ours, OURS)
    # What only concerns generation does not make another model.
    check_resume(tmp_path, qwen2(hidden_size=64, pad_token_id=1), OURS)
    with pytest.raises(CheckpointError) as caught:
        check_resume(tmp_path, qwen2(hidden_size=32), OURS)
    assert re.search(mentions("hidden_size", 64, 32), str(caught.value))
    assert "vocab_size" not in str(caught.value)
    with pytest.raises(
        CheckpointError, match=mentions("architectures", "Qwen2ForCausalLM", "LlamaForCausalLM")
    ):
        check_resume(
            tmp_path, LlamaConfig(hidden_size=64, architectures=["LlamaForCausalLM"]), OURS
        )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("num_experts", 8, ("num_local_experts", 4, 8)),
        ("num_experts_per_tok", 1, ("num_experts_per_tok", 2, 1)),
        ("norm_topk_prob", True, ("norm_topk_prob", False, True)),
        ("moe_intermediate_size", 16, ("moe_intermediate_size", 8, 16)),
    ],
)
def test_other_experts_make_another_model(tmp_path, field, value, named):
    fields = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "moe_intermediate_size": 8,
    }
    model = model_identity(Qwen3MoeConfig(**fields))
    make_checkpoint(checkpoints_dir(tmp_path), 1, model=model)
    with pytest.raises(CheckpointError, match=mentions(*named)):
        check_resume(tmp_path, Qwen3MoeConfig(**fields | {field: value}), OURS)


def with_settings(**settings: Any) -> Config:
    """OURS with new values of `section.key`, dots as double underscores."""
    tree = OURS.model_dump(mode="json", exclude_none=True)
    for name, value in settings.items():
        section, key = name.split("__")
        tree[section][key] = value
    return parse_config(tree, source="test")


LEARNED = {
    "objective__method": "gspo",
    "optimizer__learning_rate": 1e-3,
    "batch__rollouts_per_prompt": 4,
    "rollout__temperature": 0.5,
    "run__seed": 1,
}


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_may_not_change_unless_it_is_said(tmp_path, name):
    ours = Qwen2Config(hidden_size=64)
    path = make_checkpoint(checkpoints_dir(tmp_path), 3, model=model_identity(ours))
    setting = name.replace("__", ".")
    changed = with_settings(**{name: LEARNED[name]})
    with pytest.raises(
        ConfigError, match=mentions(setting, repr(LEARNED[name]), str(path), "run.allow_changes")
    ):
        check_resume(tmp_path, ours, changed)
    allowed = {name: LEARNED[name], "run__allow_changes": [setting, "optimizer.weight_decay"]}
    check_resume(tmp_path, ours, with_settings(**allowed))


def test_what_is_computed_otherwise_may_change(tmp_path):
    ours = Qwen2Config(hidden_size=64)
    make_checkpoint(checkpoints_dir(tmp_path), 3, model=model_identity(ours))
    changed = with_settings(
        run__num_steps=20, batch__max_tokens_per_microbatch=8192, checkpoint__every_steps=2
    )
    check_resume(tmp_path, ours, changed)


def test_changes_are_recorded_by_the_step_before_which_they_were_made(tmp_path):
    def resume(step: int, before: Config, now: Config) -> list[dict]:
        path = make_checkpoint(tmp_path / str(len(list(tmp_path.iterdir()))), step, config=before)
        record_changes(tmp_path, manifest.read_manifest(path), now)
        return read_changes(tmp_path)

    gspo, slow = with_settings(objective__method="gspo"), with_settings(optimizer__learning_rate=1)
    assert resume(2, OURS, OURS) == []
    assert not (tmp_path / "changes.json").exists()
    first = {"step": 3, "changes": {"objective.method": ["gapo", "gspo"]}}
    assert resume(3, OURS, gspo) == [first]
    assert resume(3, OURS, gspo) == [first]  # killed before it saved
    assert resume(5, gspo, gspo) == [first]
    assert [one["step"] for one in resume(7, gspo, slow)] == [3, 7]
    assert resume(5, gspo, gspo) == [first]  # from an older checkpoint: what was after is void
    assert resume(2, OURS, OURS) == []
    (tmp_path / "changes.json").write_text("{}")
    with pytest.raises(DataError, match=r"changes\.json"):
        read_changes(tmp_path)


def test_other_held_out_problems_are_recorded_and_need_no_allowance(tmp_path):
    """Renamed input files of a step are no change: the files' contents are compared."""
    ours = Qwen2Config(hidden_size=64)
    before = with_settings(data__eval_path="aime.jsonl")
    now = with_settings(data__eval_path="amc.jsonl", data__train_path="moved/train.jsonl")
    path = make_checkpoint(checkpoints_dir(tmp_path), 3, config=before, model=model_identity(ours))
    check_resume(tmp_path, ours, now)
    record_changes(tmp_path, manifest.read_manifest(path), now)
    change = {"data.eval_path": ["aime.jsonl", "amc.jsonl"]}
    assert read_changes(tmp_path) == [{"step": 3, "changes": change}]


def test_check_resume_leaves_damage_to_the_resume_while_one_manifest_is_whole(tmp_path):
    ours, folder = Qwen2Config(), checkpoints_dir(tmp_path)
    older = make_checkpoint(folder, 1, model=model_identity(ours))
    (make_checkpoint(folder, 2) / "manifest.json").write_text("{}")
    check_resume(tmp_path, ours, OURS)
    sign_document(older, put("version", value=2))  # one of another format is whole nowhere
    with pytest.raises(CheckpointError, match=mentions("step_00000002/manifest.json")):
        check_resume(tmp_path, ours, OURS)
    shutil.rmtree(folder / "step_00000002")
    with pytest.raises(CheckpointError, match=mentions(older, "version 2", manifest.VERSION)):
        check_resume(tmp_path, ours, OURS)


def test_identity_is_plain_json():
    identity = model_identity(
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    )
    assert json.loads(json.dumps(identity)) == identity
    assert identity["rope_parameters"]["rope_theta"] == 1e4
