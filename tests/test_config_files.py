"""The files in configs/: each loads and dry-runs anywhere, and says what the paper's tables say."""

import io
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from gapo_megatron.config import load_config
from gapo_megatron.dry_run import print_dry_run

CONFIGS = Path(__file__).parents[1] / "configs"
# Studies (files with a `config`) are of their own form: test_study.py.
FILES = sorted(p for p in CONFIGS.rglob("*.toml") if "config" not in tomllib.loads(p.read_text()))
EXPERIMENTS = sorted({path.parent for path in FILES} - {CONFIGS})

# Method -> clips, as in the paper's tables; the distilled model has clips of its own.
WIDE, NARROW, DISTILLED = (0.2, 0.28), (3e-3, 5e-3), (7e-5, 3e-4)
PAPER = {
    "qwen_math_1_5b": {
        "grpo": (0.2, 0.2),
        "f_grpo": (0.2, 0.2),
        "dr_grpo": WIDE,
        "gapo_token": WIDE,
        "gspo": (3e-3, 3e-3),
        "gspo_asym": NARROW,
        "f_gspo": NARROW,
        "gapo": NARROW,
    },
    "llama_3_2_3b": {
        "grpo": (0.2, 0.2),
        "f_grpo": (0.2, 0.2),
        "gspo": (3e-3, 3e-3),
        "gspo_asym": NARROW,
        "f_gspo": NARROW,
        "gapo": NARROW,
    },
    "ds_r1_1_5b": {"gspo_asym": DISTILLED, "f_gspo": DISTILLED, "gapo": DISTILLED},
    "deepcoder_1_5b": {"dapo": WIDE, "gapo_token": WIDE},
}
MAX_RESPONSE = {
    "qwen_math_1_5b": 3092,
    "llama_3_2_3b": 8192,
    "ds_r1_1_5b": 24576,
    "deepcoder_1_5b": 24576,
}
NUM_PROMPTS = {name: 24_269 if name == "deepcoder_1_5b" else 39_202 for name in PAPER}
TOKEN_LEVEL = {"grpo", "f_grpo", "dr_grpo", "dapo", "gapo_token"}


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_loads_and_dry_runs(path: Path) -> None:
    output = io.StringIO()
    print_dry_run(load_config(path), world_size=8, console=Console(file=output))
    assert "World-size arithmetic" in output.getvalue()


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=name_of)
def test_experiment_has_the_papers_methods_at_the_papers_clips(folder: Path) -> None:
    found = {}
    for path in folder.glob("*.toml"):
        if path.stem == "base":
            continue
        method = load_config(path).objective.resolve()
        assert method.name == path.stem
        assert (method.ratio == "token") == (method.name in TOKEN_LEVEL)
        found[method.name] = (method.eps_low, method.eps_high_max)
    assert found == PAPER[folder.name]


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=name_of)
def test_experiment_has_the_papers_hyperparameters(folder: Path) -> None:
    for path in folder.glob("*.toml"):
        config = load_config(path)
        batch, optimizer, rollout = config.batch, config.optimizer, config.rollout
        assert (batch.rollout_prompts, batch.minibatch_prompts, batch.rollouts_per_prompt) == (
            256,
            64,
            8,
        )
        assert (optimizer.learning_rate, optimizer.weight_decay) == (1e-6, 0.01)
        assert (optimizer.clip_grad, optimizer.warmup_steps) == (1.0, 0)
        assert (config.objective.kl_coef, config.objective.entropy_coef) == (0, 0)
        assert (rollout.temperature, rollout.top_p) == (1.0, 1.0)
        assert config.model.precision == "bf16"
        assert config.data.max_prompt_tokens == 2048
        assert rollout.max_response_tokens == MAX_RESPONSE[folder.name]
        assert config.run.num_steps == 10 * NUM_PROMPTS[folder.name] // 256


def test_methods_of_an_experiment_differ_in_nothing_else() -> None:
    """No copies: a method file sets its objective and its output folder, the base the rest."""
    for folder in EXPERIMENTS:
        for path in folder.glob("*.toml"):
            if path.stem == "base":
                continue
            tree = tomllib.loads(path.read_text())
            assert tree["base"] == "base.toml"
            assert set(tree) == {"base", "run", "objective"}, path
            assert tree["run"] == {"output_dir": f"runs/{folder.name}/{path.stem}"}


def test_output_folders_are_distinct() -> None:
    folders = [load_config(path).run.output_dir for path in FILES]
    assert len(set(folders)) == len(folders)
