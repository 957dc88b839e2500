"""pass@k, and evaluation over an engine."""

from __future__ import annotations

import itertools
import math

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig, parse_config
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import DataError
from gapo_megatron.evaluate.counts import read_counts
from gapo_megatron.evaluate.evaluate import evaluate, evaluation_seed
from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k, pass_at_k
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.requests import request_seed
from gapo_megatron.types import Prompt
from gapo_tools.demonstration import demo_task as arithmetic
from tests.acting import acting_of
from tests.messages import mentions
from tests.scripted_engine import LoneReplicas, ScriptedEngine, says
from tests.two_turn import Draws, state_of_generators


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples):
    for num_correct in range(num_samples + 1):
        samples = [1] * num_correct + [0] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(samples, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            # Both are one division of integers.
            assert pass_at_k(num_samples, num_correct, k) == share


def test_pass_at_k_of_large_counts_neither_overflows_nor_rounds_to_one():
    # 1 - C(n-1, k)/C(n, k) = k/n
    assert pass_at_k(100_000, 1, 256) == 256 / 100_000


@pytest.mark.parametrize(
    ("n", "c", "k", "named"),
    [
        (4, 5, 1, "num_correct (5)"),
        (4, -1, 1, "num_correct (-1)"),
        (4, 2, 0, "k (0)"),
        (4, 2, 5, "k (5)"),
    ],
)
def test_pass_at_k_refuses_impossible_counts(n, c, k, named):
    with pytest.raises(ValueError, match=mentions(named, f"num_samples ({n})")):
        pass_at_k(n, c, k)


def test_problems_with_too_few_samples_leave_the_mean():
    assert mean_pass_at_k([(4, 1), (2, 0), (4, 4)], 4) == 1.0
    assert mean_pass_at_k([(4, 1), (2, 0), (4, 4)], 1) == pytest.approx((0.25 + 0 + 1) / 3)
    assert math.isnan(mean_pass_at_k([(2, 1)], 4))


def _config(**evaluation):
    return parse_config(
        {
            "run": {"output_dir": "x", "num_steps": 1, "seed": 5},
            "model": {"hf_dir": "x"},
            "data": {"train_path": "x", "eval_path": "x"},
            "rollout": {"max_response_tokens": 7, "top_p": 0.9},
            "reward": {"kind": "exact"},
            "evaluation": {"samples_per_prompt": 4, "temperature": 0.5, **evaluation},
        },
        source="test",
    )


PROMPTS = [
    Prompt("a", (3,), "1", "easy"),
    Prompt("b", (3,), "2", "hard"),
    Prompt("c", (3,), "3", "hard"),
]
RESPONSES = {"a": ["1", "1", "1", "2"], "b": ["2", "1", "1", "1"], "c": ["1"] * 4}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = arithmetic.write_tokenizer(["0123456789+=>"], folder)
    arithmetic.write_initial_model(tokenizer, folder, seed=0)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def pool():
    with rewards.start_pool(RewardConfig(kind="exact"), num_workers=1) as pool:
        yield pool


def settings(pool, tokenizer) -> dict:
    return {"pool": pool, "environment": OneTurn(tokenizer), "config": _config()}


def test_evaluation_measures_all_and_every_level(pool, tokenizer, tmp_path):
    engine = ScriptedEngine(says(tokenizer, RESPONSES))
    path = tmp_path / "step_3.json"
    metrics = evaluate(engine, PROMPTS, **settings(pool, tokenizer), output=path)
    assert metrics == pytest.approx(
        {
            "eval/pass@1": (0.75 + 0.25 + 0) / 3,
            "eval/pass@4": 2 / 3,
            "eval/easy/pass@1": 0.75,
            "eval/easy/pass@4": 1.0,
            "eval/hard/pass@1": 0.125,
            "eval/hard/pass@4": 0.5,
            "eval/unknown_verdicts": 0.0,
            "eval/response_tokens": 2.0,
            "eval/truncated": 0.0,
        }
    )
    assert read_counts(tmp_path / "step_3.json") == [
        {"id": "a", "level": "easy", "num_samples": 4, "num_correct": 3},
        {"id": "b", "level": "hard", "num_samples": 4, "num_correct": 1},
        {"id": "c", "level": "hard", "num_samples": 4, "num_correct": 0},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step_3.json"]


def test_evaluation_samples_as_configured_with_its_own_seeds(pool, tokenizer):
    seeds = []
    for _ in range(2):
        engine = ScriptedEngine(says(tokenizer, RESPONSES))
        evaluate(engine, PROMPTS, **settings(pool, tokenizer))
        assert {one.max_tokens for one in engine.asked} == {7}
        assert {(one.temperature, one.top_p) for one in engine.asked} == {(0.5, 0.9)}
        seeds.append([one.seed for one in engine.asked])
    assert seeds[0] == seeds[1]
    assert seeds[0] == [
        request_seed(evaluation_seed(5), 0, prompt.id, sample)
        for prompt in PROMPTS
        for sample in range(4)
    ]
    assert len({evaluation_seed(seed) for seed in range(100)} | set(range(100))) == 200


def test_a_rank_judges_its_part_of_what_its_engine_made(pool, tokenizer):
    replicas = LoneReplicas(world_size=2, size=2)  # and nobody else gathers with it
    engine = ScriptedEngine(says(tokenizer, RESPONSES), replicas=replicas)
    assert evaluate(engine, PROMPTS, **settings(pool, tokenizer))["eval/pass@1"] == 0.75


def test_evaluation_meets_the_environment_of_training(pool, tokenizer):
    """The verdict is on what it says, the figures are of what the model sampled."""

    class Corrects(OneTurn):
        def begin(self, prompt):
            return (9, *prompt.token_ids)

        def respond(self, episode):
            return None if episode.response_mask is not None else [8, 8, 8]

        def judge(self, episode):
            return episode.prompt.answer, episode.prompt.answer

    engine = ScriptedEngine(says(tokenizer, RESPONSES))
    environment = Corrects(tokenizer)
    calls = acting_of(environment).calls("evaluation_0", engine.replicas)
    own = {"environment": environment, "calls": calls}
    metrics = evaluate(engine, PROMPTS, **settings(pool, tokenizer) | own)
    assert metrics["eval/pass@1"] == 1.0
    assert metrics["eval/response_tokens"] == 4.0
    assert {tuple(one.prompt_ids) for one in engine.asked} == {(9, 3)}


def test_an_environments_draws_leave_the_random_generators_alone(pool, tokenizer):
    before = state_of_generators()
    environment = Draws((7, 8))
    engine = ScriptedEngine(lambda request: [tokenizer.eos_token_id])
    acting = acting_of(environment, eos_token_ids=[tokenizer.eos_token_id])
    calls = acting.calls("evaluation_0", engine.replicas)
    own = {"environment": environment, "calls": calls}
    assert evaluate(engine, PROMPTS[:1], **settings(pool, tokenizer) | own)
    assert calls.counts["a", 0].num_calls == 2
    assert state_of_generators() == before


def test_an_unknown_verdict_leaves_the_samples(tokenizer):
    # To this verifier "1" is unknown and everything else correct.
    with rewards.Pool("tests.reward_setup", num_workers=1, timeout_s=60) as pool:
        engine = ScriptedEngine(says(tokenizer, RESPONSES))
        metrics = evaluate(engine, PROMPTS, **settings(pool, tokenizer))
    # a keeps 1 of 4 samples, b 1, c none: every known one is correct, and none is left for pass@4.
    assert metrics["eval/pass@1"] == 1.0
    assert "eval/pass@4" not in metrics
    assert metrics["eval/unknown_verdicts"] == pytest.approx(10 / 12)


def test_a_verifier_may_compare_the_samples_of_a_problem(tokenizer, tmp_path):
    """All of them: the evaluation's number, not that of training; truncated ones too."""
    path = tmp_path / "majority.py"
    path.write_text(
        "def verify_group(responses, answer):\n"
        "    assert len(responses) == 4\n"
        "    return [one == max(responses, key=responses.count) for one in responses]\n"
    )
    with rewards.start_pool(RewardConfig(kind=f"{path}:verify_group"), num_workers=1) as pool:
        engine = ScriptedEngine(says(tokenizer, RESPONSES))
        metrics = evaluate(engine, PROMPTS, **settings(pool, tokenizer))
    assert metrics["eval/pass@1"] == pytest.approx((0.75 + 0.75 + 1) / 3)
    assert metrics["eval/unknown_verdicts"] == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["JSON"]),
        ("[]", ["problems"]),
        ('{"problems": {}}', ["problems"]),
        ('{"problems": [3]}', ["problem 1", "id"]),
        ('{"problems": [{"id": "a", "num_samples": 2, "num_correct": 3}]}', ["problem 1", "a"]),
        ('{"problems": [{"id": "a", "num_samples": 2, "num_correct": 0.5}]}', ["problem 1", 0.5]),
        ('{"problems": [{"id": [], "num_samples": 2, "num_correct": 1}]}', ["problem 1"]),
        ('{"problems": [{"id": "a", "num_samples": 2, "num_correct": NaN}]}', ["NaN"]),
    ],
)
def test_an_evaluation_that_is_damaged_is_refused_by_problem(tmp_path, text, named):
    path = tmp_path / "step_3.json"
    path.write_text(text)
    with pytest.raises(DataError, match=mentions(path, *named)):
        read_counts(path)
