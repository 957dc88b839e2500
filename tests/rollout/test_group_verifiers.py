"""Verifiers that compare, and metrics of verifiers, in whole batches of a rollouter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import Config, RewardConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.run.start import build_rollouter
from gapo_megatron.types import Episode, Outcome, Prompt
from tests.acting import one_turn_inputs
from tests.learn_setup import GROUP_SIZE
from tests.rollout.test_sample import TOKENIZER, Numbered, Setup, config_of
from tests.scripted_engine import ThreadReplicas

GROUP = """
def verify_group(responses, answer, token_ids, row):
    # `Numbered` says which problem's response it is.
    assert len(responses) == len(token_ids) == {size} and len(set(responses)) == 1
    problem = int(responses[0])
    assert row["id"] == problem
    shortest = min(map(len, token_ids))
    return [
        {{"score": problem % 3 and len(one) == shortest, "problem": problem}} for one in token_ids
    ]
"""


class Same(Numbered):
    """All responses to a problem have its answer."""

    def judge(self, episode: Episode) -> tuple[str, str]:
        return episode.prompt.id, ""


class Comparing(Setup):
    def begin(self, config: Config, source: Any) -> Rollouter:
        inputs = one_turn_inputs(source, TOKENIZER)
        inputs.environment = Same(TOKENIZER)
        pool: Any = self.pool
        return build_rollouter(config, inputs, self.engine, pool)


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"dynamic_sampling_rounds": 2},
        {"oversampling": 1.5},
        {"oversampling": 1.5, "partial_rollouts": True},
        {"oversampling": 1.5, "partial_rollouts": True, "dynamic_sampling_rounds": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_group_is_compared_whole(
    tmp_path: Path, batch: dict[str, Any], num_ranks: int
) -> None:
    """Whoever judges it, and whether an earlier step began it; its metrics are the batch's."""
    path = tmp_path / "group.py"
    path.write_text(GROUP.format(size=GROUP_SIZE))
    config = config_of(6, **batch)
    reward = RewardConfig(kind=f"{path}:verify_group")
    problems = [Prompt(str(i), (50, i), "", row={"id": i}) for i in range(60)]
    sizes = ThreadReplicas.of(num_ranks, size=1)
    pools = [rewards.start_pool(reward, num_workers=1) for _ in range(num_ranks)]
    try:
        setups = [
            Comparing(
                config.model_copy(update={"reward": reward}),
                PromptSource(problems, seed=0),
                replicas=replicas,
                pool=pool,  # type: ignore[arg-type]
            )
            for replicas, pool in zip(sizes, pools, strict=True)
        ]
        for step in range(3):
            with ThreadPoolExecutor(num_ranks) as threads:
                sampled = [*threads.map(lambda one, step=step: one.collect(step), setups)]
            for one in setups:  # as `checks.carry` does before the next update
                one.rollouter.open_groups = one.rollouter.open_groups.carried()
            table, metrics = sampled[0].table, sampled[0].metrics
            assert all(one.table.tobytes() == table.tobytes() for one in sampled)
            assert all(one.metrics == metrics for one in sampled)
            assert metrics["reward/unknown_share"] == 0
            lengths = table["num_response_tokens"].reshape(-1, GROUP_SIZE)
            outcomes = table["outcome"].reshape(-1, GROUP_SIZE)
            for problem, size, found in zip(sampled[0].problems, lengths, outcomes, strict=True):
                right = (size == size.min()) & (problem % 3 > 0)
                assert ((found == Outcome.CORRECT.code) == right).all(), problem
            by_c = {name for name in metrics if name.startswith("per_c/verifier/problem/c")}
            assert by_c and "verifier/problem" in metrics
            if not batch:
                numbers = sampled[0].problems
                assert metrics["verifier/problem"] == pytest.approx(sum(numbers) / len(numbers))
    finally:
        for pool in pools:
            pool.close()
