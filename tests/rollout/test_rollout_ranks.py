"""Engines of several ranks, and with experts, in separate processes."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.errors import WeightSyncError
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run.cores import share_of_cores
from tests.dist import run_distributed
from tests.messages import mentions
from tests.rollout_setup import (
    LONG,
    TOLERANCE,
    build_engine,
    generate,
    largest_difference,
    make_config,
    make_model,
    make_prompts,
    perturb,
    tokens_of,
    trainer_log_probs,
    update_weights,
    vllm_environment,
    weights,
)


def two_ranks(folder: str, tp_size: int):
    cores = share_of_cores()  # before vLLM binds its threads to some of them
    os.environ.update(vllm_environment(dist.get_rank(), dist.get_world_size()))
    engine = build_engine(make_config(Path(folder), tensor_parallel_size=tp_size))
    shared_memory = re.findall(
        r"/dev/shm/(\S*cpushm\S*|gapo\S*)", Path("/proc/self/maps").read_text()
    )
    prompts = make_prompts(5)
    mine = engine.replicas.share(prompts)
    groups = engine.replicas.part(list(zip(mine, generate(engine, mine), strict=True)))
    gathered = engine.replicas.gather(groups)
    alone = tokens_of(generate(engine, prompts))
    aborted = [
        generate(engine, mine, should_abort=lambda _, rank=rank: dist.get_rank() == rank) is None
        for rank in range(2)
    ]
    calls = []
    first = generate(engine, mine, num_groups=1, on_ended=calls.append, **LONG)
    begun = {prompt.id: group for prompt, group in zip(mine, first, strict=True)}
    rest = generate(engine, mine, begun=begun, step=1, **LONG)
    rest_ids = [r.token_ids for group in rest for r in group]
    prompt_ids = [np.array(p.token_ids) for p in mine for _ in range(2)]
    scored = engine.score(Rollouts.of(prompt_ids, rest_ids))
    again = tokens_of(generate(engine, prompts))
    model = make_model(False)
    perturb(model, seed=1)
    update_weights(engine, weights(model).items(), policy_version=1)
    tuned = generate(engine, mine)
    message = ""
    prompt_ids = [np.array(prompt.token_ids) for prompt in prompts]
    response_ids = [group[0].token_ids for _, group in gathered]
    expected = trainer_log_probs(model, prompt_ids, response_ids)
    check = verify_weights(engine, Rollouts.of(prompt_ids, response_ids), expected)
    if dist.get_rank() == 1:
        expected[2] = expected[2] + 1.0
    try:
        verify_weights(engine, Rollouts.of(prompt_ids, response_ids), expected)
    except WeightSyncError as error:
        message = str(error)
    return {
        "mine": [prompt.id for prompt in mine],
        "part": [prompt.id for prompt, _ in groups],
        "cores": cores,
        "ids": [prompt.id for prompt, _ in gathered],
        "alone": alone,
        "tokens": tokens_of([group for _, group in gathered]),
        "aborted": aborted,
        "ended": [[(one.prompt.id, one.sample) for one in ended] for ended in calls],
        "first": [[(r.token_ids.tolist(), r.finished) for r in group] for group in first],
        "rest": [[(r.token_ids.tolist(), r.finished) for r in group] for group in rest],
        "rest_noise": max(
            np.abs(values - r.log_probs).max()
            for values, r in zip(scored, (r for group in rest for r in group), strict=True)
        ),
        "again": again,
        "difference": largest_difference(model, mine, tuned),
        "noise": check.max_abs_diff,
        "message": message,
        "shared_memory": set(shared_memory),
        # vLLM's build for CPUs without AVX-512 has none: its ranks then talk through gloo.
        "shares_memory": hasattr(torch.ops._C, "init_shm_manager"),
    }


@pytest.mark.system
@pytest.mark.parametrize(
    ("tp_size", "shares"),
    [(1, [["p0", "p1"], ["p2", "p3", "p4"]]), (2, [["p0", "p1", "p2", "p3", "p4"]] * 2)],
    ids=["data-parallel", "tensor-parallel"],
)
def test_two_ranks(tmp_path, tp_size, shares):
    make_model(False).save_pretrained(tmp_path)
    results = run_distributed(two_ranks, 2, str(tmp_path), tp_size)
    assert [result["mine"] for result in results] == shares
    if tp_size == 2:  # ranks of one engine have stopped together, and hold the same
        for name in ("first", "ended", "rest"):
            assert results[0][name] == results[1][name]
    # Either way each rank has its own to judge.
    assert [result["part"] for result in results] == [["p0", "p1"], ["p2", "p3", "p4"]]
    for result in results:
        assert result["cores"] == max(1, len(os.sched_getaffinity(0)) // 2)
    for result in results:
        assert result["ids"] == ["p0", "p1", "p2", "p3", "p4"]
        assert result["tokens"] == result["alone"]
        # All abort together; in a replica its first rank speaks for all.
        assert result["aborted"] == [True, tp_size == 1]
        # Stopped after a group is whole, and continued.
        flags = [[finished for _, finished in group] for group in result["first"]]
        assert sum(map(all, flags)) >= 1 and not all(map(all, flags))
        for group, start in zip(result["rest"], result["first"], strict=True):
            for (tokens, finished), (before, was_finished) in zip(group, start, strict=True):
                assert finished and tokens[: len(before)] == before
                assert len(tokens) > len(before) or was_finished
        assert result["rest_noise"] < TOLERANCE
        assert result["again"] == result["alone"]
        assert result["difference"] < TOLERANCE
        assert result["noise"] < TOLERANCE
        assert re.search(mentions("rank 1 ", "sequence 2 "), result["message"])
        # vLLM's own name is that of every other engine on this machine, dead ones included.
        names = result["shared_memory"]
        assert len(names) == (2 if tp_size == 2 and result["shares_memory"] else 0)
        assert all(re.match(r"gapo_megatron-[0-9a-f]{32}-tp:\d+-0-1_[01]$", name) for name in names)
