"""Acceptance of draft tokens by c."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import RewardConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.rollout.call_metrics import join_sums
from gapo_megatron.rollout.draft_metrics import draft_metrics, sum_drafts
from gapo_megatron.rollout.engine import Completion
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from tests.acting import acting_of
from tests.rollout.test_sample import ATTEMPT, config_of
from tests.rollout.test_tools import EOS, TOKENIZER
from tests.scripted_engine import ScriptedEngine, place_of

CORRECT, WRONG = Verdict(Outcome.CORRECT), Verdict(Outcome.WRONG)


def episode(num_tokens: int, num_drafted: int, num_accepted: int, **facts: object) -> Episode:
    tokens = np.zeros(num_tokens, np.int32)
    one = Episode(Prompt("p", (5,), ""), 0, tokens, tokens.astype(np.float32))
    return replace(one, num_drafted=num_drafted, num_accepted=num_accepted, **facts)


def test_groups_count_with_their_c() -> None:
    groups = [
        [episode(10, 8, 4), episode(10, 2, 0)],
        [episode(20, 0, 0), episode(20, 0, 0)],
        [episode(5, 3, 3), episode(5, 3, 0)],
    ]
    verdicts = [[CORRECT, WRONG], [WRONG, WRONG], [WRONG, CORRECT]]
    parts = [sum_drafts(groups[:1], verdicts[:1]), sum_drafts(groups[1:], verdicts[1:])]
    assert draft_metrics(join_sums(parts)) == {
        "rollout/draft_acceptance": 7 / 16,
        "rollout/draft_share": 7 / 70,
        "per_c/draft_share/c0": 0.0,  # nothing was proposed: it has no acceptance
        "per_c/draft_acceptance/c1": 7 / 16,
        "per_c/draft_share/c1": 7 / 30,
    }


def test_only_tokens_of_this_step_count() -> None:
    """Those of earlier steps have versions; of ranks that only generate, no log-probs."""
    carried = {"carried_versions": np.zeros(6, np.int32)}
    groups = [[episode(10, 4, 2, **carried)]]
    assert draft_metrics(sum_drafts(groups, [[WRONG]]))["rollout/draft_share"] == 2 / 4
    groups = [[episode(6, 0, 0, **carried)]]
    assert draft_metrics(sum_drafts(groups, [[WRONG]])) == {}


@pytest.mark.parametrize("judges_truncated", [True, False])
def test_c_is_that_of_the_table(judges_truncated: bool) -> None:
    groups = [[episode(10, 4, 2, truncated=True)]]
    sums = sum_drafts(groups, [[CORRECT]], judges_truncated=judges_truncated)
    assert [*sums] == [int(judges_truncated)]


def test_a_batch_counts_what_the_engine_says_of_each_response() -> None:
    config = config_of(2)
    problems = [Prompt(str(i), (10 + i,), answer="84") for i in range(2)]

    class Drafting(ScriptedEngine):
        def poll(self) -> list[Completion]:
            return [
                replace(one, num_drafted=4, num_accepted=int(one.name[-1]))
                for one in super().poll()
            ]

    def script(request) -> list[int]:
        problem, sample = place_of(request)
        said = ">84" if sample <= int(problem) else ">1"
        return [*TOKENIZER.encode(said), EOS]

    found = []
    for counts_drafts in (True, False):
        with rewards.start_pool(RewardConfig(kind="exact"), num_workers=1) as pool:
            rollouter = Rollouter(
                Drafting(script),
                PromptSource(problems, seed=0),
                pool,
                acting_of(OneTurn(TOKENIZER), eos_token_ids=[EOS]),
                batch=config.batch,
                sampling=SamplingSettings(num_samples=4, max_response_tokens=100, seed=7),
                reward=config.reward,
            )
            rollouter.counts_drafts = counts_drafts
            sampled = rollouter.collect(0, attempt=ATTEMPT, stopwatch=Stopwatch())
        assert sampled is not None
        found.append({key: value for key, value in sampled.metrics.items() if "draft" in key})
    shares = {
        f"per_c/draft_acceptance/c{c}": (0 + 1 + 2 + 3) / 16 for c in (1, 2)
    }  # of problems 0 and 1
    assert found[0].items() >= (shares | {"rollout/draft_acceptance": 6 / 16}).items()
    assert found[1] == {}
