"""Loading: precedence, and a ConfigError for every wrong key, value and combination."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from gapo_megatron.config import load_config, load_recorded, parse_config
from gapo_megatron.config.counts import num_generation_ranks
from gapo_megatron.config.methods import METHODS
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import to_toml
from tests.messages import mentions

MINIMAL = """
[run]
output_dir = "runs/x"
num_steps = 3
[model]
hf_dir = "models/x"
[data]
train_path = "data/x.jsonl"
[rollout]
max_response_tokens = 64
[reward]
kind = "exact"
"""


GENERATION = ("rollout.generation_nodes=1",)
AHEAD = (*GENERATION, "rollout.max_staleness=2", "objective.importance_weight_max=2")


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.toml"
    path.write_text(MINIMAL)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize("path", ["~/x", "$HOME/x", "/scratch/${USER}/x", "runs/$SLURM_JOB_ID"])
@pytest.mark.parametrize("key", ["run.output_dir", "model.hf_dir", "data.train_path"])
def test_a_path_for_a_shell_is_refused(minimal: Path, key: str, path: str) -> None:
    """It would be a folder of this name in the working directory."""
    assert re.search(mentions(key, path, "not expanded"), error_of(minimal, f"{key}={path}"))
    load_config(minimal, [f"{key}=./~/100$/$5"])


# --- precedence ----------------------------------------------------------------------------------


def test_file_beats_base_and_override_beats_file(minimal: Path) -> None:
    (folder := minimal.parent / "methods").mkdir()
    middle = folder / "middle.toml"  # a base is relative to the file that names it
    middle.write_text('base = "../minimal.toml"\n[run]\nseed = 1\nnum_steps = 4\n[batch]\n')
    top = minimal.with_name("top.toml")
    top.write_text('base = "methods/middle.toml"\n[run]\nseed = 2\n')

    config = load_config(top, ["run.seed=3"])
    assert config.run.seed == 3
    assert load_config(top).run.seed == 2
    assert load_config(middle).run.seed == 1
    # What a file does not mention comes from below, key by key within a section.
    assert (config.run.num_steps, config.run.output_dir) == (4, "runs/x")


def test_overrides_are_toml_values_or_bare_words(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "objective.method=gspo",
            "model.hf_dir=/models/a b=c",
            "optimizer.learning_rate=1e-4",
            "rollout.enforce_eager=true",
            'metrics.wandb_project="7"',
        ],
    )
    assert config.objective.method == "gspo"
    assert config.model.hf_dir == "/models/a b=c"
    assert config.optimizer.learning_rate == 1e-4
    assert config.rollout.enforce_eager is True
    assert config.metrics.wandb_project == "7"


NO_WIDTH_BY_C = ("topr", "m2po", "bapo")


@pytest.mark.parametrize("method", NO_WIDTH_BY_C)
def test_a_width_by_c_where_there_is_no_width_is_refused(minimal: Path, method: str) -> None:
    widths = ["objective.eps_low=0.1", "objective.eps_high_max=0.2"]
    settings = [f"objective.method={method}", *widths, "objective.off_policy_mask=0.5"]
    load_config(minimal, [*settings, "objective.adaptive=false"])
    message = error_of(minimal, *settings, "objective.adaptive=true")
    assert "adaptive (true)" in message and repr(method) in message


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NO_WIDTH_BY_C])
def test_the_width_by_c_and_the_off_policy_mask_go_with_every_other_method(
    minimal: Path, method: str
) -> None:
    preset = METHODS[method]
    low = min(preset.eps_low, preset.eps_high_max)  # cispo's is no bound: there must be one
    settings = [f"objective.method={method}", f"objective.eps_low={low}"]
    settings.append("objective.off_policy_mask=0.5")
    for value in ("true", "false"):
        found = load_config(minimal, [*settings, f"objective.adaptive={value}"]).objective
        assert found.resolve() == dataclasses.replace(
            preset, eps_low=low, adaptive=value == "true", off_policy_mask=0.5
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("key", "value", "owners"),
    [
        ("ratio_max", 7.0, {"dppo_tv", "dcpo", "aspo"}),
        ("eps_low_correct", 0.4, {"abc"}),
        ("eps_high_wrong", 1.5, {"abc"}),
        ("rescue_noise", 0.3, {"nsr"}),
        ("second_moment_max", 0.5, {"m2po"}),
        ("positive_share_min", 0.3, {"bapo"}),
    ],
)
def test_a_number_of_some_methods_is_refused_under_the_others(
    minimal: Path, method: str, key: str, value: float, owners: set[str]
) -> None:
    overrides = [f"objective.method={method}", f"objective.{key}={value}"]
    if method in owners:
        assert getattr(load_config(minimal, overrides).objective.resolve(), key) == value
        return
    message = error_of(minimal, *overrides)
    for named in (f"{key} ({value})", repr(method), *owners):
        assert named in message, message


def test_every_sequence_is_needed_only_with_kl_or_entropy(minimal: Path) -> None:
    def needs(*overrides: str) -> bool:
        return load_config(minimal, list(overrides)).objective.needs_every_sequence

    assert [needs(), needs("objective.kl_coef=0.1"), needs("objective.entropy_coef=0.1")] == [
        False,
        True,
        True,
    ]


def test_config_is_frozen(minimal: Path) -> None:
    config = load_config(minimal)
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 1  # type: ignore[misc]


# --- unknown keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "names"),
    [
        (
            "optimizer.learning_rat=1e-6",
            ["optimizer.learning_rat:", "'learning_rate'"],
        ),
        ("optimiser.learning_rate=1e-6", ["optimiser", "'optimizer'"]),
        ("parallel.tensor_parallel_size=2", ["'tensor_model_parallel_size'"]),
        ("rollout.tensor_model_parallel_size=2", ["'tensor_parallel_size'"]),
        ("reward.zzz=1", ["reward.zzz", "kind", "sandbox"]),
        ("rollout.stop=x", ["rollout.stop:", "'environment.stop'"]),
        ("supervised.num_step=1", ["supervised.num_step:", "'num_steps'"]),
    ],
)
def test_unknown_key_names_the_nearest(minimal: Path, override: str, names: list[str]) -> None:
    message = error_of(minimal, override)
    assert all(name in message for name in names), message


# --- wrong values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("run.num_steps=0", "greater than 0"),
        ("run.num_steps=2.5", "integer"),
        ('run.seed="1"', "integer"),
        ("run.output_dir=3", "string"),
        ("model.precision=half", "'fp32', 'bf16', 'fp16' or 'fp8'"),
        ("batch.rollout_prompts=true", "integer"),
        ("rollout.top_p=1.5", "less than or equal to 1"),
        ("reward.kind=maths", "did you mean 'math'"),
        ("environment.kind=tool", "did you mean 'tools'"),
        ("objective.eps_low=nan", "finite"),
        ("objective.method=gap", "'gapo'"),
    ],
)
def test_wrong_value_names_field_value_and_rule(minimal: Path, override: str, rule: str) -> None:
    name, _, value = override.partition("=")
    shown = "True" if value == "true" else value.strip('"')
    message = error_of(minimal, override)
    assert re.search(mentions(*name.split("."), rule), message) and shown in message


# Overrides, then what the error must name.
COMBINATIONS = """
batch.rollout_prompts=256 batch.minibatch_prompts=60 -> minibatch_prompts (60); rollout_prompts (256)
batch.partial_rollouts=true -> partial_rollouts; oversampling
parallel.sequence_parallel=true -> sequence_parallel; tensor_model_parallel_size
batch.max_tokens_per_microbatch=2000 -> max_tokens_per_microbatch (2000); max_prompt_tokens; = 2112
objective.eps_low=3 objective.eps_high_max=5 -> eps_low (3.0); 1
objective.eps_high_max=2e-3 -> eps_high_max (0.002); eps_low (0.003)
objective.method=gspo objective.eps_low=4e-3 -> eps_high_max (0.003); eps_low (0.004)
objective.method=sapo objective.eps_high_max=0 -> eps_high_max (0.0); greater than 0
objective.method=cispo objective.adaptive=true objective.eps_low=0.3 -> eps_high_max (0.28); eps_low (0.3); adaptive=true
objective.method=grpo objective.std_floor=0.1 objective.normalize_std=false -> std_floor (0.1); normalize_std
model.fp8_recipe=blockwise -> fp8_recipe ('blockwise'); precision; 'fp8'; 'bf16'
model.precision=fp32 rollout.quantization=fp8 -> rollout.quantization ('fp8'); model.precision; 'bf16'; 'fp32'
evaluation.every_steps=10 -> evaluation.every_steps; data.eval_path
objective.importance_weight_max=2 rollout.top_p=0.9 -> rollout.top_p (0.9); objective.importance_weights ('sequence')
objective.old_log_probs=rollout objective.importance_weight_max=2 -> objective.importance_weights ('sequence'); objective.old_log_probs; 'trainer'
objective.old_log_probs=rollout batch.partial_rollouts=true batch.oversampling=2 -> batch.partial_rollouts (true); objective.old_log_probs; 'trainer'
objective.old_log_probs=rollout rollout.top_p=0.9 -> rollout.top_p (0.9); must be 1; objective.old_log_probs 'rollout'
objective.old_log_probs=rollout adapter.kind=lora rollout.quantization=fp8 -> objective.old_log_probs ('rollout'); 'trainer'; rollout.quantization ('fp8')
objective.old_log_probs=rollout adapter.kind=lora adapter.targets=["experts"] -> objective.old_log_probs ('rollout'); adapter.targets (['experts'])
objective.importance_weights=none objective.importance_weight_max=3 -> importance_weight_max (3.0); importance_weights 'none'
objective.routing_replay=trainer objective.old_log_probs=rollout -> routing_replay ('trainer'); old_log_probs 'trainer'
adapter.rank=8 -> rank (8); kind 'lora'; 'none'
adapter.kind=lora adapter.targets=["qkv","qkv"] -> targets (['qkv', 'qkv']); once
rollout.generation_nodes=2 rollout.generation_ranks=16 -> rollout.generation_ranks (16); rollout.generation_nodes (2); must be 0
rollout.generation_nodes=1 optimizer.offload=all -> optimizer.offload ('all'); 'none'; rollout.generation_nodes (1)
rollout.generation_ranks=3 optimizer.offload=all -> optimizer.offload ('all'); 'none'; rollout.generation_ranks (3)
rollout.max_staleness=1 objective.importance_weight_max=2 -> rollout.max_staleness (1); needs rollout.generation_nodes
AHEAD data.eval_path=e.jsonl evaluation.every_steps=3 -> evaluation.every_steps (3); multiple; rollout.max_staleness (2)
AHEAD checkpoint.every_steps=5 -> checkpoint.every_steps (5); multiple; rollout.max_staleness (2)
AHEAD checkpoint.keep_steps=[4,7] -> checkpoint.keep_steps (7); multiple; rollout.max_staleness (2)
environment.settings={a=1} -> environment; settings; 'one_turn'
environment.kind=nemo_gym reward.kind=environment batch.oversampling=2 batch.partial_rollouts=true -> batch.partial_rollouts (True); environment.kind ('nemo_gym')
environment.kind=tools environment.structured_outputs=true batch.oversampling=2 batch.partial_rollouts=true -> batch.partial_rollouts (True); structured_outputs
rollout.draft_tokens=2 -> draft_tokens (2); 'ngram' or 'eagle3'; 'none'
rollout.draft=eagle3 rollout.draft_hf_dir=d rollout.draft_ngram=2 -> draft_ngram (2); 'ngram'; 'eagle3'
rollout.draft=ngram rollout.draft_hf_dir=d -> draft_hf_dir ('d'); 'eagle3'; 'ngram'
rollout.draft=eagle3 -> draft ('eagle3'); draft_hf_dir
rollout.draft=ngram rollout.engine=json:loads -> draft ('ngram'); 'vllm'; 'json:loads'
model.megatron_dir=models/m supervised.initial_hf_dir=models/i supervised.train_path=s.jsonl supervised.num_steps=1 -> model.megatron_dir (models/m); supervised; model.hf_dir
"""  # noqa: E501


@pytest.mark.parametrize("line", COMBINATIONS.strip().splitlines())
def test_wrong_combination_names_both_sides(minimal: Path, line: str) -> None:
    given, names = line.replace("AHEAD", " ".join(AHEAD)).split(" -> ")
    message = error_of(minimal, *given.split())
    assert all(name in message for name in names.split("; ")), message


def test_samples_of_a_step_are_a_number_or_all(minimal: Path) -> None:
    key = "metrics.samples_per_step"
    for given in (0, 64, "all"):
        assert load_config(minimal, [f"{key}={given}"]).metrics.samples_per_step == given
    for wrong in ("65", "-1", "1.5", "true", "every"):
        message = error_of(minimal, f"{key}={wrong}")
        assert all(part in message for part in (key, wrong.title() if wrong == "true" else wrong))
        assert "0 to 64" in message and '"all"' in message


def test_ratios_against_an_engine_that_computes_with_factors_are_allowed(minimal: Path) -> None:
    (own := minimal.parent / "own.py").write_text("class Engine: ...\n")
    for more in ((), ("adapter.targets=['experts']", f"rollout.engine={own}:Engine")):
        load_config(minimal, ["objective.old_log_probs=rollout", "adapter.kind=lora", *more])


def test_generation_may_run_ahead_with_and_without_weights(minimal: Path) -> None:
    ahead = load_config(minimal, [*AHEAD, "checkpoint.every_steps=4"])
    assert ahead.rollout.has_generation_side and ahead.rollout.max_staleness == 2
    for more in ("objective.old_log_probs=rollout", "objective.importance_weights=none"):
        kept = load_config(minimal, [*GENERATION, "rollout.max_staleness=1", more])
        assert kept.objective.importance_weight_max is None
    # One step ahead, weights are sent after every step: any period will do.
    load_config(minimal, [*AHEAD, "rollout.max_staleness=1", "checkpoint.every_steps=5"])
    assert not load_config(minimal).rollout.has_generation_side


@pytest.mark.parametrize(
    ("given", "weights", "largest"),
    [
        ([], "none", None),
        (["importance_weights=token"], "token", 2.0),
        (["importance_weight_max=3"], "sequence", 3.0),
        (["importance_weights=token", "importance_weight_max=3"], "token", 3.0),
    ],
)
def test_a_setting_of_importance_weights_alone_means_the_other(
    minimal: Path, given: list[str], weights: str, largest: float | None
) -> None:
    found = load_config(minimal, [f"objective.{one}" for one in given]).objective
    assert (found.importance_weights, found.importance_weight_max) == (weights, largest)
    again = type(found).model_validate(found.model_dump())
    assert again == found


def test_ranks_that_generate_are_the_last_nodes_or_the_last_ranks(minimal: Path) -> None:
    def num(override: str, **job: int) -> int:
        return num_generation_ranks(load_config(minimal, [override]).rollout, **job)

    six_nodes = {"world_size": 48, "ranks_per_node": 8}
    assert num("rollout.generation_nodes=0", **six_nodes) == 0
    assert num("rollout.generation_nodes=2", **six_nodes) == 16
    assert num("rollout.generation_nodes=5", **six_nodes) == 40
    assert num("rollout.generation_ranks=3", world_size=4, ranks_per_node=4) == 3
    for override, job, parts in (
        ("rollout.generation_nodes=6", six_nodes, (6, "must be below", "nodes")),
        ("rollout.generation_nodes=1", six_nodes | {"world_size": 44}, (1, 44, "multiple of 8")),
        ("rollout.generation_ranks=48", six_nodes, (48, "must be below the world size")),
    ):
        with pytest.raises(ConfigError, match=mentions(override.partition("=")[0], *parts)):
            num(override, **job)


def test_every_problem_is_reported_at_once(minimal: Path) -> None:
    message = error_of(minimal, "run.num_steps=0", "rollout.top_p=2", "reward.kin=math")
    assert all(name in message for name in ("run.num_steps", "rollout.top_p", "reward.kin"))


@pytest.mark.parametrize("section", ["run", "model", "data", "rollout", "reward"])
def test_missing_section_is_named(section: str) -> None:
    tree = tomllib.loads(MINIMAL)
    del tree[section]
    with pytest.raises(ConfigError, match=mentions("x.toml", f"{section}: required")):
        parse_config(tree, source="x.toml")


# --- broken files and overrides -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        ("[run\n", (), ("minimal.toml", "TOML", "line 1")),
        ("base = 3\n" + MINIMAL, (), ("base (3)",)),
        ('base = "nowhere.toml"\n', (), ("nowhere.toml", "No such file")),
        ('base = "./minimal.toml"\n', (), ("minimal.toml", "base", "circle")),
        ("reward = 3\n", (), ("reward (3)",)),
        ("reward = 3\n", ("reward.kind=math",), ("reward.kind=math", "reward", "section")),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(
    minimal: Path, text: str, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    minimal.write_text(text)
    assert re.search(mentions(*parts), error_of(minimal, *overrides))


@pytest.mark.parametrize("override", ["run.seed", "seed=1", "run.=1", ".seed=1", "a.b.c=1", ""])
def test_malformed_override_says_the_form(minimal: Path, override: str) -> None:
    message = error_of(minimal, override)
    assert re.search(mentions(repr(override), "section.key=value"), message)


def test_a_recorded_digest_is_kept_or_must_agree(tmp_path: Path) -> None:
    """A frozen config is refused after an edit; a run's own config says what the run had."""
    own, path = tmp_path / "own.py", tmp_path / "config.toml"
    own.write_text("def verify(response, answer):\n    return True\n")
    path.write_text(MINIMAL)
    config = load_config(path, [f"reward.kind={own}:verify"])
    assert len(config.reward.code) == 64
    frozen = tmp_path / "frozen.toml"
    frozen.write_text(to_toml(config))
    assert load_config(frozen) == load_recorded(frozen) == config
    own.write_text("def verify(response, answer):\n    return False\n")
    assert load_recorded(frozen) == config
    with pytest.raises(ConfigError, match=r"frozen\.toml: reward\.code .*own\.py"):
        load_config(frozen)
    with pytest.raises(ConfigError, match=r"frozen\.toml: reward\.code .*names none"):
        load_config(frozen, ["reward.kind=exact"])
    assert load_config(frozen, ["reward.kind=exact", "reward.code="]).reward.code == ""
    own.unlink()
    assert load_recorded(frozen) == config
