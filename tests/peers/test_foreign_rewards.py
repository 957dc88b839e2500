"""Reward functions of verl, TRL and slime: the same verdicts on real solutions of GSM8K."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.types import Outcome
from tests.rewards.foreign_rewards import NAMES, TEXTS

DATA = Path(__file__).parents[3] / "shared" / "data"
SOLUTIONS = "verifier_completions/gsm8k_model_solutions.jsonl"


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the public problem sets beside the checkout")
def test_one_reward_in_three_forms_judges_gsm8k_the_same(tmp_path: Path) -> None:
    kinds = {}
    for framework, text in TEXTS.items():
        (tmp_path / f"{framework}_reward.py").write_text(text)
        kinds[framework] = f"{tmp_path}/{framework}_reward.py:{NAMES[framework]}"
    config = RewardConfig(kind="exact", verifiers=kinds)
    items, labels = [], []
    for line in (DATA / SOLUTIONS).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = row["ground_truth"].rpartition("A:")[2].strip().replace(",", "")
        columns = {
            **{"prompt": row["question"], "ground_truth": answer},
            **{"data_source": "openai/gsm8k", "extra_info": {"split": "test"}},
        }
        for model in ("6b_finetuning", "175b_verification"):
            extras = {"token_ids": [5, 6], "prompt_token_ids": [1, 2, 3]}
            items.append((row[model]["solution"], answer, columns, extras))
            labels.append(row[model]["is_correct"])
    with rewards.start_pool(config, num_workers=2) as pool:
        found = {
            name: pool.judge(
                [(text, answer, name, row, extras) for text, answer, row, extras in items]
            )
            for name in kinds
        }
    outcomes = {name: [one.outcome for one in some] for name, some in found.items()}
    assert len(items) == 2638 and outcomes["verl"] == outcomes["trl"] == outcomes["slime"]
    assert Outcome.UNKNOWN not in outcomes["verl"]
    metrics = {name: [dict(one.metrics) for one in some] for name, some in found.items()}
    assert metrics["verl"] == metrics["trl"] == metrics["slime"]
    # Against the data's own labels: their texts of numbers differ a few times ("3.0", "10%").
    agree = [
        (one is Outcome.CORRECT) == label
        for one, label in zip(outcomes["verl"], labels, strict=True)
    ]
    assert sum(agree) / len(agree) > 0.99 and 600 < sum(labels) < 2000
