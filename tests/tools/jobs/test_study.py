from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from gapo_megatron.config import Config, load_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.run_folder import mark_finished
from gapo_megatron.io.toml_tree import to_toml
from gapo_tools.jobs.study import Resources, Run, read_study, unfinished
from gapo_tools.planner.layout import Layout
from tests.messages import mentions

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
DEMO = CONFIGS / "demo.toml"
HEAD = f'config = "{DEMO}"\noutput_dir = "runs/s"\n'


def study_file(folder: Path, text: str) -> Path:
    path = folder / "clips.toml"
    path.write_text(text)
    return path


def runs_of(folder: Path, text: str) -> list[Run]:
    return read_study(study_file(folder, HEAD + text)).runs


def names_of(folder: Path, text: str) -> list[str]:
    return [run.name for run in runs_of(folder, text)]


def test_grid_is_every_combination_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = HEAD + "[grid]\nobjective.method = ['gspo', 'gapo']\n'run.seed' = [0, 1]\n"
    study = read_study(study_file(tmp_path, text), ["run.num_steps=3"])
    assert (study.name, study.folder) == ("clips", tmp_path / "runs" / "s")
    names = ["gspo-seed_0", "gspo-seed_1", "gapo-seed_0", "gapo-seed_1"]
    assert [run.name for run in study.runs] == names
    assert study.runs[3].run_dir == tmp_path / "runs" / "s" / "gapo-seed_1"
    assert study.runs[3].config == load_config(
        DEMO,
        [
            "run.num_steps=3",
            "objective.method=gapo",
            "run.seed=1",
            "run.output_dir=runs/s/gapo-seed_1",
        ],
    )


def test_listed_runs_join_the_grids_and_their_settings_go_together(tmp_path: Path) -> None:
    text = (
        "[[grid]]\nobjective.eps_low = [1e-3]\nobjective.eps_high_max = [2e-3]\n"
        "[[grid]]\nobjective.eps_low = [1e-3]\nobjective.eps_high_max = [4e-3]\n"
        "[[runs]]\nobjective.eps_low = 0.01\nobjective.eps_high_max = 0.02\n"
        "[[runs]]\nmodel.recompute = 'full'\nrollout.enforce_eager = false\n"
    )
    runs = runs_of(tmp_path, text)
    assert [run.name for run in runs] == [
        "eps_low_0.001-eps_high_max_0.002",
        "eps_low_0.001-eps_high_max_0.004",
        "eps_low_0.01-eps_high_max_0.02",
        "full-enforce_eager_False",
    ]
    assert [run.config.objective.eps_low for run in runs] == [1e-3, 1e-3, 0.01, 0.01]
    assert runs[3].config.model.recompute == "full"
    assert not runs[3].config.rollout.enforce_eager


def test_a_name_is_of_the_runs_own_settings(tmp_path: Path) -> None:
    """Another value, added later, must not give the first runs other folders."""
    text = "[grid]\nrun.num_steps = [5]\nmetrics.wandb_project = {}\n"
    runs = runs_of(tmp_path, text.format(["a b+c", "7"]))
    assert [run.name for run in runs] == ["num_steps_5-a_b+c", "num_steps_5-7"]
    assert runs[1].config.metrics.wandb_project == "7"  # no number, as it would be in an override
    assert runs_of(tmp_path, text.format(["7"]))[0].name == runs[1].name


def test_branches_are_told_apart_by_what_they_left(tmp_path: Path) -> None:
    """The first of a name keeps it: it may have been run before there was another one."""
    branch = "[[runs]]\nrun.seed = 1\ncheckpoint.branch_from = 'runs/a/checkpoints/step_{}'\n"
    alone = "[[runs]]\ncheckpoint.branch_from = 'runs/b/checkpoints/step_5'\n"
    runs = runs_of(tmp_path, branch.format(100) + branch.format(150) + alone)
    assert [run.name for run in runs] == ["seed_1", "seed_1-a-step_150", "b-step_5"]
    assert runs[1].config.checkpoint.branch_from == "runs/a/checkpoints/step_150"
    assert len({run.run_dir for run in runs} | {tmp_path / "runs" / "s"}) == 4
    with pytest.raises(ConfigError, match=mentions("two", "seed_1-a-step_100")):
        runs_of(tmp_path, 3 * branch.format(100))


BRANCH = "[[runs]]\nrun.seed = 1\ncheckpoint.branch_from = '{}'\n"


def begun(folder: Path, text: str, *, finished: bool) -> Run:
    """The only run of a study, as it stands after its start, or its end."""
    (run,) = read_study(study_file(folder, text)).runs
    run.run_dir.mkdir(parents=True, exist_ok=True)
    (run.run_dir / "config.toml").write_text(to_toml(run.config))
    if finished:
        mark_finished(run.run_dir, num_steps=run.config.run.num_steps)
    return run


HOW = {
    "rollout.memory_fraction": 0.3,
    "rollout.cpu_kv_cache_gib": 7,
    "rollout.tensor_parallel_size": 2,
    "rollout.enforce_eager": False,
    "rollout.verify_bound": 0.5,
    "batch.max_tokens_per_microbatch": 9999,
    "model.recompute": "full",
    "model.head": "torch",
    "reward.num_workers": 3,
    "parallel.overlap_grad_reduce": True,
    "optimizer.offload": "optimizer",
}
WHAT = {
    "objective.eps_high_max": 0.5,
    "objective.method": "gspo",
    "data.eval_path": "elsewhere.jsonl",
    "data.train_path": "elsewhere.jsonl",
    "batch.rollouts_per_prompt": 4,
    "rollout.temperature": 0.5,
    "rollout.max_response_tokens": 9,
}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("oversampling", [1.0, 1.5])
def test_how_a_run_computes_may_change_once_it_has_begun(
    tmp_path: Path, finished: bool, oversampling: float
) -> None:
    """When it is out of memory, above all; but not what it computes.

    Over-sampled runs keep what decides which groups are first.
    """
    text = HEAD.replace("runs/s", str(tmp_path / "s")) + "[[runs]]\nrun.seed = 1\n"
    text += f"batch.oversampling = {oversampling}\n"
    run_dir = begun(tmp_path, text, finished=finished).run_dir
    path = study_file(tmp_path, text)
    timing = ("memory_fraction", "cpu_kv_cache_gib", "enforce_eager", "tensor_parallel_size")
    kept = {f"rollout.{key}": HOW[f"rollout.{key}"] for key in timing if oversampling > 1}
    others = [f"{key}={json.dumps(value)}" for key, value in HOW.items() if key not in kept]
    assert len(unfinished(read_study(path, others))) == 1 - finished
    how = r".*\bfinished\b" if finished else r".*\bbegun\b"
    for key, value in {**WHAT, **kept}.items():
        with pytest.raises(ConfigError, match=mentions(run_dir, key, value) + how):
            unfinished(read_study(path, [f"{key}={json.dumps(value)}"]))


@pytest.mark.parametrize("finished", [False, True])
def test_a_branch_stays_one_of_its_branch_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """How that is written is free."""
    monkeypatch.chdir(tmp_path)
    begun(tmp_path, HEAD + BRANCH.format("runs/a/checkpoints/step_100"), finished=finished)
    for given in (f"{tmp_path}/runs/a/checkpoints/step_100", "runs/a/checkpoints/step_00000100"):
        path = study_file(tmp_path, HEAD + BRANCH.format(given))
        assert len(unfinished(read_study(path))) == 1 - finished
    for given in ("runs/a/checkpoints/step_150", "runs/b/checkpoints/step_100", ""):
        path = study_file(tmp_path, HEAD + BRANCH.format(given))
        values = ("'runs/a/checkpoints/step_100'", repr(given))
        with pytest.raises(ConfigError, match=mentions("checkpoint.branch_from", *values)):
            unfinished(read_study(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD, mentions("[grid]", "[[runs]]")),
        (HEAD + "grids = 1\n", r"\bgrids\b.*\bconfig, output_dir, grid, runs\b"),
        (HEAD + "[resources]\nnode = 2\n", r"\bresources\.node\b.*\bnodes, tasks_per_node\b"),
        (HEAD + "[grid]\nresources.nodes = [0]\n", r"\bnodes_0\b.*\bresources\.nodes\W+0\b"),
        (HEAD + "[grid]\nresources.time = ['30']\n", r"\bresources\.time\W+30\b.*\bname\b"),
        (HEAD + "[resources]\ntime = 'long'\n", r"\bresources\.time\W+long\b"),
        (HEAD + "[grid]\nrun.seed = []\n", r"\bgrid\.run\.seed\b.*\[\]"),
        (HEAD + "[grid]\nseed = [3]\n", mentions("seed=3", "section.key=value")),
        (HEAD + "[grid]\nrun.seed = [0, -1]\n", r"\bseed_-1\b.*\brun\.seed\W+-1\b"),
        (HEAD + "[grid]\nrun.output_dir = ['a']\n", r"\brun\.output_dir\b"),
        (HEAD + "[grid]\nrun.seed = [1, 1]\n", mentions("two", "'seed_1'")),
        (HEAD + "[[runs]]\n", mentions("{}", "name")),
        (HEAD + "[grid]\nmetrics.wandb_project = ['..']\n", mentions("'..'", "name")),
        (
            HEAD + f"[grid]\nmetrics.wandb_project = ['{'x' * 128}', '{'x' * 300}']\n",
            "wandb_project",
        ),
        (HEAD + "[grid]\nrun.seed = [2024-01-01]\n", mentions("run.seed", "datetime.date")),
        (HEAD + "[grid]\n'run.seed=1 #' = [1]\n", mentions("section.key=value")),
        (
            HEAD + "[grid]\n" + "".join(f"a.b{n} = {[0] * 100}\n" for n in range(9)),
            mentions(100**9, "runs"),
        ),
        (HEAD.replace("runs/s", "runs/s\\u0000") + "[grid]\nrun.seed = [1]\n", "output_dir"),
        ("config = 'x.toml'\n", r"\boutput_dir\b"),
        ("config = 1\noutput_dir = 'a'\n", r"\bconfig\W+1\b"),
        ("config = 'no.toml'\noutput_dir = 'a'\n[grid]\nrun.seed=[1, 2]\n", r"\bno\.toml\b"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = study_file(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_study(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=3", mentions("run.seed=3", "varies")),
        ("run.output_dir=a", r"\brun\.output_dir\b"),
        ("run.num_step=3", r"\brun\.num_step\b"),
    ],
)
def test_overrides_that_contradict_the_study(tmp_path: Path, override: str, words: str) -> None:
    path = study_file(tmp_path, HEAD + "[grid]\nrun.seed = [0, 1]\n")
    with pytest.raises(ConfigError, match=words):
        read_study(path, [override])


def test_runs_may_ask_for_resources_of_their_own(tmp_path: Path) -> None:
    """Over the study's; what makes another run is part of its name, and of no config."""
    text = HEAD + (
        "[grid]\nresources.nodes = [1, 4]\n"
        "[[runs]]\nrun.seed = 1\n[runs.resources]\ntasks_per_node = 2\ntime = '30'\n"
        "[[runs]]\nrun.seed = 2\n"
        "[resources]\nnodes = 2\ntasks_per_node = 4\n"
    )
    study = read_study(study_file(tmp_path, text))
    found = {run.name: run.resources for run in study.runs}
    assert found == {
        "nodes_1": Resources(nodes=1, tasks_per_node=4),
        "nodes_4": Resources(nodes=4, tasks_per_node=4),
        "seed_1-tasks_per_node_2": Resources(nodes=2, tasks_per_node=2, time="30"),
        "seed_2": Resources(nodes=2, tasks_per_node=4),
    }
    assert study.runs[0].config == load_config(DEMO, ["run.output_dir=runs/s/nodes_1"])


def test_runs_that_differ_in_how_they_are_placed_alone_have_names(tmp_path: Path) -> None:
    """But the first keeps its own: it may be there already."""
    runs = runs_of(tmp_path, "[grid]\nrun.seed = [0]\nresources.cpus_per_task = [4, 8]\n")
    assert {run.name: run.resources.cpus_per_task for run in runs} == {
        "seed_0": 4,
        "seed_0-cpus_per_task_8": 8,
    }
    text = "[grid]\nresources.exclusive = [true, false]\nresources.partition = ['a', 'b']\n"
    names = ["a", "b", "exclusive_False-a", "exclusive_False-b"]
    assert names_of(tmp_path, text) == names
    for field, values in (("time", "['30', '40']"), ("account", "['a', 'b']")):
        with pytest.raises(ConfigError, match=mentions("two", "'seed_0'")):
            runs_of(tmp_path, f"[grid]\nrun.seed = [0]\nresources.{field} = {values}\n")


def test_a_command_line_asks_for_every_run_but_not_for_what_the_study_varies(
    tmp_path: Path,
) -> None:
    text = HEAD + (
        "[grid]\nresources.nodes = [1, 4]\n"
        "[[runs]]\nresources.nodes = 2\nrun.seed = 1\nresources.tasks_per_node = 3\n"
    )
    study = read_study(study_file(tmp_path, text))
    runs = study.asking({"time": "30"}, default={"tasks_per_node": 1, "time": "40"}).runs
    asked = [(run.resources.nodes, run.resources.tasks_per_node) for run in runs]
    assert asked == [(1, 1), (4, 1), (2, 3)]
    assert {run.resources.time for run in runs} == {"30"}
    with pytest.raises(ConfigError, match=r"\bnodes\W+8\b.*\b1, 2, 4\b"):
        study.asking({"nodes": 8}, default={})
    with pytest.raises(ConfigError, match=r"^time\W+long\b"):
        study.asking({"time": "long"}, default={})


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for path in [*CONFIGS.rglob("*.toml"), *(ROOT / "studies").rglob("*.toml")]
        if "config" in tomllib.loads(path.read_text())
    ),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_study_of_the_repository(path: Path) -> None:
    for run in read_study(path).runs:
        size = run.resources.nodes * run.resources.tasks_per_node
        Layout.of(run.config, world_size=size)


@pytest.mark.parametrize("folder", ["qwen_math_1_5b", "arena"])
def test_a_study_of_methods_is_the_files_of_its_folder(folder: str) -> None:
    """The study and the method files say the same, but for the folder a run writes to."""
    # The first run of each method: further grids of a study change other settings.
    runs: dict[str, Config] = {}
    for run in read_study(CONFIGS / f"studies/{folder}.toml").runs:
        runs.setdefault(run.config.objective.method, run.config)
    files = {path.stem: path for path in (CONFIGS / folder).glob("*.toml")}
    for other in ("base", "gapo_bf16", "gapo_repository"):
        files.pop(other, None)
    assert runs.keys() == files.keys()
    for method, path in files.items():
        ours = runs[method]
        output_dir = f"run.output_dir={ours.run.output_dir}"
        assert Path(ours.run.output_dir).parent == Path(f"runs/studies/{folder}")
        assert ours == load_config(path, [output_dir])
