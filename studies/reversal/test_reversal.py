"""The study's parts: the reversed arm, exact pass rates, the plan, the runner, the tables."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gapo_megatron.compat import onednn
from gapo_megatron.config import load_config
from gapo_megatron.data.reasoning_gym import generate
from gapo_megatron.errors import ConfigError
from gapo_megatron.objective import METHODS, policy_loss, upper_clip
from studies.reversal import __main__ as runner
from studies.reversal import plan, tables
from studies.reversal.exact import answer_probabilities
from studies.reversal.reversed import REVERSED

ROOT = Path(__file__).parents[2]


def test_the_reversed_arm_has_gapos_widths_in_mirrored_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Around every edge of either arm; wrong responses have the same lower width."""
    monkeypatch.chdir(ROOT)
    c = torch.arange(1, 8)
    widths = {"eps_low": 3e-3, "eps_high_max": 12e-3}
    edges = upper_clip(8 - c, group_size=8, **widths)
    assert edges.tolist() == upper_clip(c, group_size=8, **widths).flip(0).tolist()
    ratios = torch.cat([1 + edges - 1e-6, 1 + edges + 1e-6, torch.tensor([0.9969, 0.9971])])
    old = torch.zeros(16, dtype=torch.float64)
    found = policy_loss(
        (old + ratios.log()).requires_grad_(),
        old,
        sequence_ids=torch.arange(16),
        advantages=torch.tensor([0.5] * 14 + [-0.5] * 2),
        num_correct=torch.cat([c, c, torch.tensor([2, 2])]),
        group_size=8,
        num_tokens_global=16,
        method=replace(REVERSED, **widths),
    )
    assert found.clipped.tolist() == [False] * 7 + [True] * 7 + [True, False]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.5))
    return made.eval()


PROMPTS = [[1, 2, 3], [4], [2, 2, 5, 1, 3, 4], [5, 1]]
ANSWERS = [[4, 0], [2, 3, 0], [0], [1, 1, 4, 0]]


@pytest.mark.parametrize("is_faster", [False, True])
def test_probabilities_are_those_of_each_problem_by_itself(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    """Padding, batches and oneDNN change nothing."""
    monkeypatch.setattr(onednn, "_SMALLEST", 1)
    monkeypatch.setattr(onednn, "_is_faster", lambda: is_faster)
    expected = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
        steps = logits.softmax(dim=-1)[len(prompt) - 1 : -1]
        expected.append(
            math.prod(float(row[token]) for row, token in zip(steps, answer, strict=True))
        )
    for most in (2048, 14, 1):
        monkeypatch.setattr("studies.reversal.exact.BATCH_TOKENS", most)
        assert answer_probabilities(model, PROMPTS, ANSWERS) == pytest.approx(expected, rel=1e-5)


def test_probabilities_are_shares_of_samples(model: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    number = 4000
    for prompt, answer, found in zip(
        PROMPTS, ANSWERS, answer_probabilities(model, PROMPTS, ANSWERS), strict=True
    ):
        sampled = model.generate(
            torch.tensor([prompt] * number),
            do_sample=True,
            top_k=0,
            max_new_tokens=len(answer),
            eos_token_id=0,
            pad_token_id=0,
        )[:, len(prompt) :]
        share = float((sampled == torch.tensor(answer)).all(dim=1).double().mean())
        assert abs(share - found) < 4 * math.sqrt(found * (1 - found) / number) + 1e-9


def test_examples_come_after_the_training_problems() -> None:
    """Training has the same problems with and without them, and none is there twice."""
    config = load_config(runner.BASE)
    (source,) = config.data.source
    small = source.model_copy(update={"size": 12, "eval_size": 6})
    alone = generate([small])
    both = generate([small.model_copy(update={"size": 18})])
    assert both.training["gym"][:12] == alone.training["gym"]
    assert both.held_out == alone.held_out
    questions = [row["prompt"] for row in both.training["gym"] + both.held_out["gym"]]
    assert len(set(questions)) == 24
    assert config.run.num_steps == plan.NUM_STEPS
    assert config.run.num_steps * config.batch.rollout_prompts <= source.size
    assert config.batch.rollouts_per_prompt == plan.K
    assert config.checkpoint.keep_steps == plan.LATE


def test_widths_are_matched_in_lost_mass() -> None:
    """Of ratios whose log is normal, and wider where fewer are correct."""
    scale = np.linspace(0.08, 0.02, 7)[:, None]
    logs = scale * np.random.default_rng(0).standard_normal((7, 4000))
    asked: list[str] = []

    def measure(arm: str, low: float, high: float) -> dict[str, float]:
        asked.append(arm)
        share = np.arange(7)[:, None] / 6
        upper = {"gapo": high - (high - low) * share, "reversed": low + (high - low) * share}
        correct = float((logs > np.log1p(upper.get(arm, high))).mean())
        wrong = float((logs < np.log1p(-low)).mean())
        both = (correct + wrong) / 2
        return {plan.LOST: both, plan.LOST_CORRECT: correct, plan.DOSE: dose}

    dose = plan.LEAST_DOSE
    widths = plan.calibrate(measure, num_processes=1)
    assert set(asked) == set(widths) == set(plan.ARMS)
    assert len(asked) < 4 * plan.MOST_WIDTHS
    found = {arm: measure(arm, *pair) for arm, pair in widths.items()}
    assert found["gapo"][plan.LOST_CORRECT] == pytest.approx(0.2, abs=plan.NEAR)
    for arm, key in (("fixed", plan.LOST_CORRECT), ("reversed", plan.LOST_CORRECT)):
        assert found[arm][key] == pytest.approx(found["gapo"][key], abs=plan.NEAREST)
        assert widths[arm][0] == widths["gapo"][0]
    assert found["symmetric"][plan.LOST] == pytest.approx(
        found["gapo"][plan.LOST], abs=plan.NEAREST
    )
    assert widths["symmetric"][0] == widths["symmetric"][1]
    dose = 0.049
    with pytest.raises(RuntimeError, match=r"0\.049"):
        plan.calibrate(measure, num_processes=1)
    with pytest.raises(RuntimeError, match="no width"):
        plan.find_width(lambda width: 0.9, target=0.2, first=1.0)


def test_a_step_between_two_widths() -> None:
    """No width loses a fifth; the nearest one is taken, unless it is far."""
    found = plan.find_width(lambda width: 0.225 if width < 3 else 0.171, target=0.2, first=1.0)
    assert found < 3
    with pytest.raises(RuntimeError, match="no width"):
        plan.find_width(lambda width: 0.231 if width < 3 else 0.169, target=0.2, first=1.0)


def test_the_deviation_is_blind_and_says_how_many_pairs() -> None:
    assert plan.pairs_needed(0.5) == plan.pairs_needed(1.1) == plan.LEAST_PAIRS
    assert plan.pairs_needed(2.0) == 13
    assert plan.detectable(2.0, 34) == pytest.approx(1.0, abs=0.02)
    assert plan.LEAST_PAIRS < plan.pairs_needed(2.5) < plan.pairs_needed(9.0) == len(plan.SEEDS)
    random = np.random.default_rng(0)
    rates = random.normal(size=(400, 1)) * 5 + random.normal(size=(400, 4)) * math.sqrt(2)
    found = plan.blind_deviation(rates)
    assert found == pytest.approx(2.0, rel=0.05)
    assert plan.blind_deviation(rates + np.array([9, -9, 0, 3])) == pytest.approx(found)


def test_nothing_runs_unless_the_registration_is_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    page, package = tmp_path / "study" / "REGISTRATION.md", tmp_path / "gapo_megatron" / "a.py"
    for path, text in ((page, "rules\n"), (package, "1\n")):
        path.parent.mkdir()
        path.write_text(text)
    git("init")
    git("add", "gapo_megatron")
    git("commit", "-m", "package")
    with pytest.raises(ConfigError, match="commit"):
        runner.registered(page)
    git("add", ".")
    with pytest.raises(ConfigError, match="commit"):
        runner.registered(page)
    git("commit", "-m", "rules")
    found = {runner.registered(page)}
    for path in (page, package):
        path.write_text("2\n")
        with pytest.raises(ConfigError, match="commit"):
            runner.registered(page)
        git("commit", "-am", "others")
        found.add(runner.registered(page))
    assert len(found) == 3


def test_a_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run is not repeated, one that failed is; other rules need another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    started: list[str] = []
    failing = {"reversed-seed_0"}

    def run(self: runner.Study, of: Path, module: str, *words: str, threads: int = 1) -> None:
        if module != "studies.reversal.exact":
            config = load_config(words[0], [*words[1:]])
        if module == "gapo_megatron.sft":
            assert config.supervised is not None
            assert config.model.hf_dir == str(of) == f"runs/reversal/tiny/{of.name}"
            assert of.name == f"start_{config.supervised.num_steps}"
            assert config.supervised.initial_hf_dir == "models/tiny"
        elif module == "gapo_megatron.train":
            started.append(of.name)
            method, seed = config.objective.resolve(), config.run.seed
            assert config.model.hf_dir == "runs/reversal/tiny/start_320"
            assert config.run.output_dir == str(of) and of.name.endswith(f"-seed_{seed}")
            assert (method.eps_low, method.eps_high_max) == study.widths[of.name.split("-")[0]]
            if of.name in failing:
                raise RuntimeError("killed")
            for step in plan.LATE:
                (of / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
            (of / "finished.json").write_text(json.dumps({"num_steps": plan.NUM_STEPS}))
        else:
            steps = [str(int(Path(one).name[5:])) for one in words[3:]] or ["0"]
            rate = 0.01 if of.name == "start_160.json" else 0.5
            of.write_text(json.dumps({step: [rate, rate] for step in steps}))

    monkeypatch.setattr(runner.Study, "_python", run)
    packed: list[dict[tuple[str, int], dict[str, np.ndarray]]] = []
    monkeypatch.setattr(tables, "pack", lambda *given: packed.append(given[4]))
    monkeypatch.setattr(runner, "write_task", lambda *_, problems, **__: problems.write_text("[]"))
    shares = {plan.LOST: 0.3, plan.LOST_CORRECT: 0.2, plan.DOSE: 0.1}
    monkeypatch.setattr(runner.Study, "_measure", lambda *_: shares)
    study = runner.Study(Path("models/tiny"), 1, "rules")
    study.make_start()
    assert study.start.name == "start_320"  # the first has too few mixed groups
    study.make_widths()
    with pytest.raises(RuntimeError, match="killed"):
        study.run_pairs(2, plan.ARMS)
    failing.clear()
    study = runner.Study(Path("models/tiny"), 1, "rules")
    study.make_start()
    monkeypatch.setattr(runner.Study, "_measure", None)
    study.make_widths()
    study.run_pairs(2, plan.ARMS)
    assert sorted(set(started)) == sorted(
        f"{arm}-seed_{seed}" for arm in plan.ARMS for seed in (0, 1)
    )
    assert started.count("gapo-seed_0") == 1
    assert started.count("reversed-seed_0") == 2
    assert not list(study.folder.glob("*/checkpoints"))
    (found,) = packed
    assert found.keys() == {("start", 0), *((arm, seed) for arm in plan.ARMS for seed in (0, 1))}
    assert found["fixed", 1].keys() == {str(step) for step in plan.LATE}
    with pytest.raises(ConfigError, match="rules"):
        runner.Study(Path("models/tiny"), 1, "other rules")


def archived(folder: Path, *, pairs: int, gain: float) -> tables.Archive:
    """Pairs in which GAPO gains `gain` points more than the others, as read from an archive."""
    random = np.random.default_rng(0)
    problems = [f"gym/held_out-{name}-{i}" for i in range(50) for name in ("chain_sum", "products")]
    start = random.uniform(0.05, 0.7, len(problems))
    found: dict[tuple[str, int], tables.Evaluations] = {("start", 0): {"0": start}}
    for seed in range(pairs):
        for arm in plan.ARMS:
            more = 0.1 + random.normal() * 0.005 + gain / 100 * (arm == "gapo")
            found[arm, seed] = {str(step): start + more for step in plan.LATE}
    widths = dict.fromkeys(plan.ARMS, (0.02, 0.08))
    tables.pack(folder, "abc123", widths, problems, found, [])
    return tables.read(folder)


def test_an_archive_says_which_arm_is_ahead(tmp_path: Path) -> None:
    archive = archived(tmp_path / "data", pairs=6, gain=3.0)
    rates = np.stack([archive.found[arm].mean(axis=(1, 2)) for arm in plan.JUDGED], axis=1)
    assert tables.blind_deviation(archive) == plan.blind_deviation(100 * rates)
    assert (
        (tmp_path / "data" / tables.PROBABILITIES)
        .read_text()
        .startswith("# SHA-256 of REGISTRATION.md: abc123\n")
    )
    page = tables.page(archive, [])
    assert "Registration abc123. 6 pairs" in page
    lines = {line.split(" | ")[1]: line for line in page.splitlines() if line.startswith("| [")}
    assert "gapo is ahead |" in lines["gapo minus reversed"]
    assert "+3." in lines["gapo minus reversed"] or "+2." in lines["gapo minus reversed"]
    assert {"chain_sum", "products", "all", "0.5 to 2.5"} <= lines.keys()
    assert "[1]" in page and "| [2] | gapo minus fixed" in page


def test_a_later_difference_is_a_test_only_after_an_earlier_one(tmp_path: Path) -> None:
    page = tables.page(archived(tmp_path, pairs=6, gain=0.0), [])
    rows = [line for line in page.splitlines() if " minus " in line and "| [" in line][:3]
    assert "less than 1.7 points apart |" in rows[0]
    assert all("(exploratory)" in row for row in rows[1:])


def test_no_arms_are_compared_before_the_last_pair(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 of 6 pairs"):
        tables.page(archived(tmp_path, pairs=5, gain=3.0), [])


def test_every_arm_is_a_method_with_its_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for method in plan.ARMS.values():
        given = [
            f"objective.method={method}",
            "objective.eps_low=0.02",
            "objective.eps_high_max=0.02",
        ]
        found = load_config(runner.BASE, given).objective.resolve()
        assert (found.eps_low, found.eps_high_max, found.ratio) == (0.02, 0.02, "sequence")
        assert found.adaptive == (method == "gapo")
    assert METHODS["gspo"].aggregation == REVERSED.aggregation == METHODS["gapo"].aggregation
