"""The files in configs/: each loads and dry-runs anywhere, and says what the paper's tables say."""

import io
import re
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from gapo_megatron.config import load_config
from gapo_megatron.config.methods import METHODS
from gapo_megatron.config.roles import changes
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.tables import rules_for
from gapo_tools.dry_run.command import print_dry_run
from gapo_tools.planner.hardware import GPUS
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import HOST_SHARE, memory
from gapo_tools.planner.plans import plan, read_model
from gapo_tools.planner.state import per_rank_parameters
from gapo_tools.planner.workload import default_workload

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout
# Studies (files with a `config`) are of their own form: test_study.py.
FILES = sorted(
    path
    for path in [*CONFIGS.rglob("*.toml"), *(ROOT / "studies").rglob("*.toml")]
    if "config" not in tomllib.loads(path.read_text())
)

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
EXPERIMENTS = [CONFIGS / name for name in PAPER]
MAX_RESPONSE = {
    "qwen_math_1_5b": 3092,
    "llama_3_2_3b": 8192,
    "ds_r1_1_5b": 24576,
    "deepcoder_1_5b": 24576,
}
NUM_PROMPTS = {name: 24_269 if name == "deepcoder_1_5b" else 39_202 for name in PAPER}
TOKEN_LEVEL = {"grpo", "f_grpo", "dr_grpo", "dapo", "gapo_token"}


# Models beyond the paper's: folder -> the published model.
LARGER = {
    "qwen2_5_7b": "Qwen2.5-7B",
    "qwen2_5_32b": "Qwen2.5-32B",
    "qwen2_5_72b": "Qwen2.5-72B",
    "llama_3_1_8b": "Llama-3.1-8B",
    "llama_3_1_70b": "Llama-3.1-70B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
}
LAYOUTS = [f"{gpu}_{limit}" for gpu in ("h100", "h200") for limit in ("8k", "24k")]


VARIANTS = [
    ("qwen_math_1_5b", "gapo_repository", {"objective.eps_low", "objective.eps_high_max"}),
    *(
        (name, "gapo_bf16", {"model.precision"})
        for name in ("qwen_math_1_5b", "llama_3_2_3b", "ds_r1_1_5b")
    ),
]


def nodes_of(path: Path) -> int:
    """Number of nodes in a config's first line; 1 if there is none."""
    found = re.search(r" on (one node|(\d+) nodes) of eight ", path.read_text().splitlines()[0])
    return int(found[2] or 1) if found else 1


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_two_write_to_one_folder() -> None:
    folders = [load_config(path).run.output_dir for path in FILES]
    assert len(folders) == len({*folders})


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_dry_runs_and_plans_on_a_fresh_clone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the model nor the data is there: shapes are the shipped ones, and that is said."""
    monkeypatch.chdir(tmp_path)
    output = io.StringIO()
    config, num_nodes = load_config(path), nodes_of(path)
    print_dry_run(
        config, world_size=8 * num_nodes, console=Console(markup=False, file=output, width=120)
    )
    text = output.getvalue()
    assert f" {8 * num_nodes} = tensor " in text
    model, note = read_model(config)
    for count in per_rank_parameters(rules_for(model), config.parallel):
        assert f" {count:,} " in text
    assert config.model.hf_dir in note and f"/{Path(config.model.hf_dir).name}.json" in note
    assert note in text
    if path.stem in LAYOUTS:  # seconds each, and compared with their plan below
        return
    workload = default_workload(config)
    found = plan(model, config, num_nodes=num_nodes, gpu=GPUS["h200"], workload=workload)
    is_layoutless = path.parent.name in LARGER  # of one node, a base file of larger models
    assert found.current is not None and (is_layoutless or not found.current_refusal)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_fits_the_gpus_that_it_is_for(path: Path) -> None:
    """80 GB, less a twentieth, since responses get longer; H200 where its name says so.

    Of larger models the base file has no layout: the files beside it do, and one is for 80 GB.
    """
    if path.stem == "base" and path.parent.name in LARGER:
        assert path.with_name("h100_8k.toml") in FILES
        return
    config, gpu = load_config(path), GPUS["h200" if path.stem.startswith("h200") else "h100"]
    hf_config, _ = read_model(config)
    layout = Layout.of_job(config, world_size=8 * nodes_of(path), ranks_per_node=8)
    predicted = memory(hf_config, config, layout, gpu)
    assert max(predicted.training, predicted.generating) <= 0.95 * gpu.memory_bytes
    host = (predicted.offloaded + predicted.checkpoint) * gpu.gpus_per_node
    assert host <= HOST_SHARE * gpu.host_memory_bytes


def method_files(folder: Path) -> list[Path]:
    """Files of an experiment that name a method each."""
    others = ("base", "gapo_bf16", "gapo_repository")
    return [path for path in folder.glob("*.toml") if path.stem not in others]


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=name_of)
def test_experiment_has_the_papers_methods_at_the_papers_clips(folder: Path) -> None:
    """A method file sets its objective and its output folder; the base the rest."""
    found = {}
    for path in method_files(folder):
        tree = tomllib.loads(path.read_text())
        assert tree["base"] == "base.toml" and set(tree) == {"base", "run", "objective"}, path
        assert tree["run"] == {"output_dir": f"runs/{folder.name}/{path.stem}"}
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
        is_paper = path.stem == "gapo_bf16"  # the others see more of their ratios
        assert config.model.precision == ("bf16" if is_paper else "fp16")
        assert config.data.max_prompt_tokens == 2048
        assert rollout.max_response_tokens == MAX_RESPONSE[folder.name]
        is_deepcoder = folder.name == "deepcoder_1_5b"
        assert config.reward.truncated == ("unknown" if is_deepcoder else "judged")
        assert config.run.num_steps == 10 * NUM_PROMPTS[folder.name] // 256


@pytest.mark.parametrize(("folder", "stem", "differs"), VARIANTS)
def test_a_variant_differs_in_nothing_else(folder: str, stem: str, differs: set[str]) -> None:
    variant, usual = (load_config(CONFIGS / folder / f"{one}.toml") for one in (stem, "gapo"))
    assert set(changes(usual.model_dump(mode="json"), variant)) == differs


def test_the_arena_is_the_papers_recipe_under_other_rules() -> None:
    """Each rule with its preset's numbers; DPPO alone is around the engine's log-probs."""
    folder = CONFIGS / "arena"
    recipe = load_config(CONFIGS / "qwen_math_1_5b" / "base.toml").model_dump(mode="json")
    for path in folder.glob("*.toml"):
        tree = tomllib.loads(path.read_text())
        config = load_config(path)
        changed = set(changes(recipe, config))
        if path.stem == "base":
            assert tree["base"] == "../qwen_math_1_5b/base.toml" and not changed
            continue
        assert (tree["base"], tree["run"]) == (
            "base.toml",
            {"output_dir": f"runs/arena/{path.stem}"},
        )
        assert set(tree) == {"base", "run", "objective"}, path
        assert config.objective.resolve() == METHODS[path.stem]
        assert changed <= {"objective.method", "objective.old_log_probs"}, path
        assert ("objective.old_log_probs" in changed) == (path.stem == "dppo_tv")


@pytest.mark.parametrize("folder", LARGER)
def test_a_larger_models_layouts_are_all_there_and_differ_in_nothing_else(folder: str) -> None:
    folder_path = CONFIGS / folder
    assert {path.stem for path in folder_path.iterdir()} == {"base", *LAYOUTS}
    base = load_config(folder_path / "base.toml").model_dump(mode="json")
    assert Path(base["model"]["hf_dir"]).name.removesuffix("-Instruct") == LARGER[folder]
    free = {"rollout.max_response_tokens", "batch.max_tokens_per_microbatch", "model.recompute"}
    for layout in LAYOUTS:
        config = load_config(folder_path / f"{layout}.toml")
        limit = {"8k": 8192, "24k": 24576}[layout.partition("_")[2]]
        assert config.rollout.max_response_tokens == limit
        assert config.run.output_dir == f"runs/{folder}/{layout}"
        check_shapes(read_model(config)[0], config.parallel)
        changed = set(changes(base, config))
        assert changed <= free | {"rollout.tensor_parallel_size"}, layout


def test_larger_models_differ_in_their_memory_alone() -> None:
    first = load_config(CONFIGS / "qwen2_5_7b" / "base.toml")
    for folder in LARGER:
        config = load_config(CONFIGS / folder / "base.toml")
        changed = changes(first.model_dump(mode="json"), config)
        assert set(changed) <= {"model.hf_dir", "rollout.memory_fraction"}, folder


@pytest.mark.parametrize(
    "folder", ["ds_r1_1_5b", "qwen_math_1_5b", "llama_3_2_3b", "deepcoder_1_5b"]
)
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_the_papers_experiments_fit_eighty_gigabytes(folder: str, gpu: str) -> None:
    """With the twentieth that a written layout leaves, on one node."""
    config = load_config(CONFIGS / folder / "base.toml")
    hf_config, _ = read_model(config)
    layout = Layout.of_job(config, world_size=8, ranks_per_node=8)
    predicted = memory(hf_config, config, layout, GPUS[gpu])
    needed = max(predicted.training, predicted.generating)
    assert needed <= 0.95 * GPUS[gpu].memory_bytes
