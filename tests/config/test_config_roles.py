"""Roles of settings: which may change in a resume, a branch and a study; removed settings."""

import json
from pathlib import Path

import pytest

from gapo_megatron.config import Config, parse_config
from gapo_megatron.config.roles import (
    broken_rules,
    changed_layout,
    changed_work,
    changes,
    role_of,
)
from gapo_megatron.config.rules import input_paths
from gapo_megatron.config.section import Role
from gapo_megatron.errors import ConfigError
from tests.messages import mentions

GOLDEN = Path(__file__).parents[1] / "golden"
SETTINGS = [
    f"{section}.{name}" for section, model in Config.sections().items() for name in model.roles()
]


def such(flag: str) -> set[str]:
    return {name for name in SETTINGS if getattr(role_of(name), flag)}


def test_every_setting_has_one_role() -> None:
    for section, model in Config.sections().items():
        assert isinstance(model.role, Role), section
        for name, field in model.model_fields.items():
            assert sum(isinstance(one, Role) for one in field.metadata) <= 1, f"{section}.{name}"


FREE = {"resume", "branch", "study"}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("run.num_steps", FREE),
        ("run.seed", set()),
        ("adapter.rank", {"arm", "step", "fixed"}),
        ("parallel.context_parallel_size", FREE | {"step"}),
        ("optimizer.learning_rate", {"arm", "step"}),
        ("objective.method", {"branch", "arm", "step"}),
        ("data.train_path", {"arm", "step"}),
        ("data.eval_path", {"branch", "arm"}),
        ("rollout.temperature", {"arm", "step", "carried"}),
        ("rollout.memory_fraction", {"branch", "study", "step", "picks_groups"}),
        ("rollout.generation_nodes", FREE | {"step", "picks_groups"}),
        ("reward.sandbox", {"branch", "study", "step"}),
        ("evaluation.samples_per_prompt", FREE | {"arm"}),
    ],
)
def test_what_a_setting_may_do(name: str, flags: set[str]) -> None:
    role = role_of(name)
    assert {flag for flag in Role.__slots__ if getattr(role, flag)} == flags


TREE = {
    "run": {"output_dir": "runs/x", "num_steps": 3},
    "model": {"hf_dir": "model"},
    "data": {"train_path": "train.jsonl"},
    "rollout": {"max_response_tokens": 64},
    "reward": {"kind": "code"},
}


def config(**sections: object) -> Config:
    tree = json.loads(json.dumps(TREE))
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree, source="test")


def test_another_sandbox_is_no_other_work() -> None:
    """For a branch, a study and a report alike; a resume logs it."""
    before = config().model_dump(mode="json")
    here = config(reward={"sandbox": "https://judge:7000"})
    assert changes(before, here) == {"reward.sandbox": ("bubblewrap", "https://judge:7000")}
    assert changed_work(before, here) == {}
    assert broken_rules(before, here) == []


def test_an_interrupted_step_is_bound_to_where_tokens_and_layers_are() -> None:
    before = config(parallel={"tensor_model_parallel_size": 2}).model_dump(mode="json")
    here = config(
        parallel={
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "overlap_grad_reduce": True,
            "timeout_s": 1900,
        }
    )
    assert changed_layout(before, here) == {"parallel.sequence_parallel": (False, True)}


def test_routes_that_are_replayed_by_default_are_replayed() -> None:
    before = config().model_dump(mode="json")
    assert changes(before, config(objective={"routing_replay": "trainer"})) == {}
    freely = {"objective.routing_replay": (None, "none")}
    assert changes(before, config(objective={"routing_replay": "none"})) == freely


def test_a_sources_file_may_move_and_its_weight_may_not_change() -> None:
    """What is in the file is compared when it is read."""

    def with_sources(**late: object) -> Config:
        tables = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", **late}]
        return config(data={"train_path": "", "source": tables})

    before = with_sources().model_dump(mode="json")
    moved = with_sources(path="elsewhere/b.jsonl")
    assert changed_work(before, moved) == {} and broken_rules(before, moved) == []
    for late in ({"weight": 2.0}, {"last_step": 5}, {"name": "c"}):
        assert [*changed_work(before, with_sources(**late))] == ["data.source"]
        [line] = broken_rules(before, with_sources(**late))
        assert "data.source" in line
    for damaged in (3, ["a"], None):  # a manifest may hold anything
        before["data"]["source"] = damaged
        assert [*changed_work(before, moved)] == ["data.source"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("objective.metod", "objective.method"),
        ("nonsense", "section.key"),
        ("objective", "objective.code"),
        ("run.num_steps", "needs no allowance"),
        ("supervised.num_steps", "needs no allowance"),  # also where there is no such section
        ("data.train_path", "needs no allowance"),  # what is in it is compared
        ("data.eval_path", "needs no allowance"),
    ],
)
def test_an_allowance_names_what_needs_one(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=mentions("run.allow_changes", repr(name), hint)):
        config(run={"allow_changes": ["objective.method", name]})


def test_all_that_a_resume_may_refuse_can_be_allowed() -> None:
    """Also what decides which groups are learned from, in runs that sample more than they need."""
    learned = set(SETTINGS) - such("study") - such("fixed") | such("picks_groups")
    config(run={"allow_changes": sorted(learned - set(input_paths(config())))})


def test_what_a_checkpoint_holds_cannot_change() -> None:
    """Of full weights and of an adapter, or of two adapters, neither continues as the other."""
    assert such("fixed") == {name for name in SETTINGS if name.startswith("adapter.")}
    for name in such("fixed"):
        with pytest.raises(ConfigError, match=mentions("run.allow_changes", repr(name), "never")):
            config(run={"allow_changes": [name]})
    [line] = broken_rules(config().model_dump(mode="json"), config(adapter={"kind": "lora"}))
    assert "adapter.kind" in line and "'none'" in line and "'lora'" in line


def test_input_paths_are_those_that_runs_read() -> None:
    supervised = {"initial_hf_dir": "initial", "train_path": "examples.jsonl", "num_steps": 1}
    found = input_paths(config(supervised=supervised, checkpoint={"branch_from": "runs/y"}))
    assert found == {
        "model.hf_dir": "model",
        "model.megatron_dir": "",
        "data.train_path": "train.jsonl",
        "data.eval_path": "",
        "rollout.draft_hf_dir": "",
        "checkpoint.branch_from": "runs/y",
        "supervised.initial_hf_dir": "initial",
        "supervised.train_path": "examples.jsonl",
    }
    assert "supervised.train_path" not in input_paths(config())
