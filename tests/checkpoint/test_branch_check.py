"""`check_branch`: settings, the branch point, and a branch that has begun."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from transformers import Qwen2Config

from gapo_megatron.checkpoint import BranchPoint, check_branch
from gapo_megatron.config import roles as settings
from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.formats import manifest
from gapo_megatron.io.run_folder import mark_finished
from tests.branch_setup import MODEL, begin, make_checkpoint, make_config, make_old_run
from tests.messages import mentions

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_old_run(tmp_path)
    return tmp_path


def test_a_branch_that_has_begun_needs_its_branch_point_no_more(root: Path) -> None:
    path = begin(root, make_config(root))
    assert check_branch(make_config(root), MODEL) is None  # resumes
    shutil.rmtree(root / "old")
    assert check_branch(make_config(root), MODEL) is None
    assert manifest.find_damage(path, manifest.read_manifest(path).files) is None
    # What it began with is part of what it is.
    for given in ("", str(root / "old/checkpoints/step_00000500")):
        named = mentions(f"checkpoint.branch_from ({given!r})", "step_600", "run.output_dir")
        with pytest.raises(ConfigError, match=named):
            check_branch(make_config(root, checkpoint={"branch_from": given}), MODEL)


@pytest.mark.parametrize(
    "given", ["{root}/old/checkpoints/step_00000600/", "old/../old/checkpoints/step_0600", "{link}"]
)
def test_the_same_branch_point_may_be_written_otherwise(
    root: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(root, make_config(root))
    (root / "link").symlink_to("old")
    monkeypatch.chdir(root)
    given = given.format(root=root, link=root / "link/checkpoints/step_600")
    assert check_branch(make_config(root, checkpoint={"branch_from": given}), MODEL) is None


def test_a_branch_may_move_together_with_the_run_it_left(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    given = {"branch_from": "old/checkpoints/step_600"}
    begin(root, make_config(root, checkpoint=given))
    (root / "elsewhere").mkdir()
    for name in ("old", "new"):
        (root / name).rename(root / "elsewhere" / name)
    monkeypatch.chdir(root / "elsewhere")
    assert check_branch(make_config(root / "elsewhere", checkpoint=given), MODEL) is None


def test_a_finished_branch_needs_no_checkpoints(root: Path) -> None:
    begin(root, make_config(root))
    shutil.rmtree(root / "new/checkpoints")
    (root / "new/metrics.jsonl").write_text("")
    with pytest.raises(
        ConfigError, match=mentions(f"run.output_dir ({root}/new)", "metrics.jsonl")
    ):
        check_branch(make_config(root), MODEL)
    mark_finished(root / "new", num_steps=900)
    assert check_branch(make_config(root), MODEL) is None
    with pytest.raises(
        ConfigError, match=mentions(f"run.output_dir ({root}/new)", "metrics.jsonl")
    ):
        check_branch(make_config(root, run={"num_steps": 901}), MODEL)


def test_a_damaged_manifest_of_its_own_is_named(root: Path) -> None:
    path = begin(root, make_config(root)) / "manifest.json"
    path.write_text("{")
    with pytest.raises(CheckpointError, match=mentions(path, f"remove {root}/new ")):
        check_branch(make_config(root), MODEL)


def test_a_run_that_began_by_itself_cannot_become_a_branch(root: Path) -> None:
    make_checkpoint(root / "new", make_config(root, checkpoint={"branch_from": ""}), step=3)
    with pytest.raises(ConfigError, match=mentions("checkpoint.branch_from", root / "new", "('')")):
        check_branch(make_config(root), MODEL)
    assert check_branch(make_config(root, checkpoint={"branch_from": ""}), MODEL) is None


MUST_AGREE = {
    "run.seed": 1,
    "model.hf_dir": "elsewhere",
    "model.precision": "fp32",
    "data.train_path": "elsewhere.jsonl",
    "data.max_prompt_tokens": 100,
    "batch.rollout_prompts": 128,
    "batch.rollouts_per_prompt": 4,
    "rollout.max_response_tokens": 65,
    "rollout.temperature": 0.5,
    "rollout.quantization": "fp8",
    "reward.timeout_s": 3,
    "optimizer.learning_rate": 1e-3,
}


@pytest.mark.parametrize("name", MUST_AGREE)
def test_what_a_branch_keeps_is_named_with_both_values_and_the_rule(root: Path, name: str) -> None:
    section, key = name.split(".")
    here = MUST_AGREE[name]
    config = make_config(root, **{section: {key: here}})
    there = getattr(getattr(make_config(root), section), key)
    with pytest.raises(ConfigError) as caught:
        check_branch(config, MODEL)
    head, *lines = str(caught.value).splitlines()
    assert "checkpoint.branch_from" in head
    (line,) = lines
    assert re.search(mentions(name, repr(there), repr(here)), line)
    assert len(line.split(": ", 1)[1]) > 20


def test_every_setting_is_free_or_has_a_rule(root: Path) -> None:
    """New sections must be covered: otherwise a branch that changes one fails without a reason."""
    before = make_config(root).model_dump(mode="json")
    before = {section: dict.fromkeys(values or {}, "x") for section, values in before.items()}
    lines = settings.broken_rules(before, make_config(root))
    named = {line.split(" is ")[0] for line in lines}
    assert set(MUST_AGREE) <= named
    assert not any(name.startswith(("objective.", "evaluation.", "parallel.")) for name in named)


def test_what_a_branch_may_change(root: Path) -> None:
    config = make_config(
        root,
        run={"num_steps": 601, "stop_margin_s": 5},
        objective={"method": "gapo", "eps_high_max": 0.006},
        evaluation={"samples_per_prompt": 2},
        data={"eval_path": "held_out.jsonl", "train_path": f"{root}/../{root.name}/train.jsonl"},
        batch={"max_tokens_per_microbatch": 4096},
        rollout={"enforce_eager": True},
        optimizer={"offload": "optimizer"},
        metrics={"tensorboard": False},
        checkpoint={"every_steps": 3},
    )
    point = check_branch(config, None)
    assert isinstance(point, BranchPoint)
    assert point.branch.changes["objective.eps_high_max"] == [None, 0.006]
    # Decide nothing that is computed.
    assert not {"run.num_steps", "optimizer.offload"} & set(point.branch.changes)


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("tensor_parallel_size", 2),
        ("memory_fraction", 0.7),
        ("cpu_kv_cache_gib", 2),
        ("enforce_eager", True),
    ],
)
def test_over_sampling_ties_a_branch_to_the_engines_it_left(
    root: Path, key: str, here: object
) -> None:
    """Their number and the size of their caches decide which groups finish first."""
    for oversampling in (1.0, 1.5):
        batch = {"oversampling": oversampling}
        before = make_config(root, batch=batch).model_dump(mode="json")
        config = make_config(root, batch=batch, rollout={"max_response_tokens": 64, key: here})
        named = [line.split(" is ")[0] for line in settings.broken_rules(before, config)]
        assert named == ([f"rollout.{key}"] if oversampling > 1 else [])


def test_how_a_sync_is_checked_may_change_when_a_run_goes_on(root: Path) -> None:
    """It computes nothing."""
    config = make_config(root)
    before = config.model_dump(mode="json")
    before["rollout"] |= {"verify_bound": 0.1}
    assert config.rollout.verify_bound is None
    assert settings.changes(before, config) == {}
    assert settings.broken_rules(before, config) == []


def test_a_damaged_config_of_a_manifest_is_compared_all_the_same(
    root: Path, tmp_path: Path
) -> None:
    """Unknown sections, invalid paths, circular links: the difference is named."""
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    config = make_config(root)
    before = config.model_dump(mode="json")
    before |= {"later": {"key": 1}, "optimizer": 3}
    before["model"] |= {"hf_dir": "a\0b"}
    before["data"] |= {"train_path": str(loop)}
    before["run"] |= {"seed": 2**400}
    lines = settings.broken_rules(before, config)
    for name in ("later.key", "optimizer", "model.hf_dir", "data.train_path", "run.seed"):
        assert any(line.startswith(f"{name} is ") for line in lines), (name, lines)


def test_changes_are_those_of_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another spelling of a path nor the model's earlier origin counts."""
    monkeypatch.chdir(root)
    supervised = {"initial_hf_dir": "initial", "train_path": "train.jsonl", "num_steps": 1}
    config = make_config(root, data={"train_path": "./train.jsonl"}, supervised=supervised)
    point = check_branch(config, MODEL)
    assert point is not None
    assert point.branch.changes == {"objective.method": ["gspo_asym", "gapo"]}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("old", "RUN/checkpoints/step_N"),
        ("old/checkpoints/step_00000600_2", "RUN/checkpoints/step_N"),
        ("old/checkpoints/step_7", "step_00000600"),
        ("none/checkpoints/step_7", ": none"),
        ("new/checkpoints/step_7", "exist"),
    ],
)
def test_a_branch_point_that_is_none(root: Path, given: str, named: str) -> None:
    config = make_config(root, checkpoint={"branch_from": f"{root}/{given}"})
    named = mentions(f"checkpoint.branch_from ('{root}/{given}')", named)
    with pytest.raises(ConfigError, match=named):
        check_branch(config, MODEL)


def test_other_mistakes_are_named(root: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("run.num_steps (600)", "600 steps")):
        check_branch(make_config(root, run={"num_steps": 600}), MODEL)
    with pytest.raises(CheckpointError, match=mentions("hidden_size", 64, 32)):
        check_branch(make_config(root), Qwen2Config(hidden_size=32))
    (root / "new").mkdir()
    (root / "new/metrics.jsonl").write_text("")
    with pytest.raises(
        ConfigError, match=mentions(f"run.output_dir ({root}/new)", "metrics.jsonl")
    ):
        check_branch(make_config(root), MODEL)
    (root / "new/metrics.jsonl").unlink()
    (root / "old/checkpoints/step_00000600/manifest.json").write_text("{")
    with pytest.raises(
        CheckpointError,
        match=mentions(root / "old/checkpoints/step_00000600/manifest.json", "JSON"),
    ):
        check_branch(make_config(root), MODEL)


def test_a_run_cannot_branch_from_itself(root: Path) -> None:
    config = make_config(root, run={"output_dir": str(root / "old")})
    with pytest.raises(
        ConfigError, match=mentions("checkpoint.branch_from", root / "old", "run.output_dir")
    ):
        check_branch(config, MODEL)
