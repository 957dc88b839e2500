"""A real vLLM engine with two tiny models, and what it is trusted with."""

import contextlib
import json
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm import EngineArgs

from gapo_megatron.compat import vllm as vllm_internals
from gapo_megatron.config import Config, parse_config
from gapo_megatron.errors import ConfigError, DataError, RewardError, RolloutError, WeightSyncError
from gapo_megatron.hf.weights import write_hf
from gapo_megatron.models.rules import to_hf, to_megatron
from gapo_megatron.models.tables import Geometry, rules_for
from gapo_megatron.rewards import Judging, Pool, score
from gapo_megatron.rollout.progress import Heartbeat, Occupancy
from gapo_megatron.rollout.vllm import (
    RolloutEngine,
    eos_token_ids,
    request_seed,
    sync_weights,
    verify_weights,
)
from gapo_megatron.rollout.vllm import engine as engine_module
from gapo_megatron.rollout.vllm.arguments import check_engine, engine_args
from gapo_megatron.rollout.vllm.schedule import Phase, Schedule
from gapo_megatron.rollout.vllm.weights import verify_bound
from gapo_megatron.run.processes import share_of_cores
from gapo_megatron.types import Prompt, Rollout
from tests.dist import run_distributed
from tests.messages import mentions
from tests.waiting import wait_until

CPU = torch.device("cpu")
VOCAB, EOS = 61, 1
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "initializer_range": 0.1,  # far from uniform: log-probs differ between tokens and weights
}
# fp32 sums of at most 256 products in another order: 3e-6 is seen on values up to 10.
TOLERANCE = 1e-5


def make_model(tied: bool) -> PreTrainedModel:
    """Qwen2 tied, Llama untied: biases and both kinds of output layer in two engines."""
    torch.manual_seed(0)
    if tied:
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=64, tie_word_embeddings=False))


def make_config(hf_dir: Path, *, precision: str = "fp32", **rollout: object) -> Config:
    return parse_config(
        {
            "run": {"output_dir": "unused", "num_steps": 1},
            "model": {"hf_dir": str(hf_dir), "precision": precision},
            "data": {"train_path": "unused", "max_prompt_tokens": 140},
            "batch": {"max_tokens_per_microbatch": 256},
            "rollout": {
                "max_response_tokens": 24,
                "enforce_eager": True,
                "verify_bound": TOLERANCE,
                **rollout,
            },
            "reward": {"kind": "exact"},
        },
        source="test",
    )


def vllm_environment(rank: int = 0, world_size: int = 1) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # the process group is up: nobody connects
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # a user's; the config says otherwise
    }


def build_engine(config: Config, *, load_weights: bool = True) -> RolloutEngine:
    hf_config = AutoConfig.from_pretrained(config.model.hf_dir)
    return RolloutEngine(config, hf_config, device="cpu", load_weights=load_weights)


def make_args(config: Config, hf_config: PretrainedConfig, device: torch.device) -> EngineArgs:
    return engine_args(config, hf_config, device, load_weights=False)


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of one rank, and the environment a launcher gives; the engine closes the group."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name, value in vllm_environment().items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        yield
        assert not dist.is_initialized()


def random_states() -> list[object]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.system)],
    ids=["tied", "untied"],
)
def built(request, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """An engine, started from a folder this package wrote, and the transformers model in it."""
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder / "source")
    ends = {EOS} if request.param else {EOS, 2}  # 2 only in generation_config.json, EOS in config's
    generation = {"eos_token_id": max(ends)}
    (folder / "source" / "generation_config.json").write_text(json.dumps(generation))
    perturb(model, seed=99)
    write_hf(
        weights(model).items(),
        source_dir=folder / "source",
        output_dir=folder / "export",
        made_by="test",
    )
    with process_group():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        states, threads = random_states(), (torch.set_num_threads, torch.get_num_threads())
        engine = build_engine(make_config(folder / "export"))
        prompts = make_prompts(2)
        yield SimpleNamespace(
            engine=engine,
            ends=ends,
            model=model.eval(),
            initial=weights(model),
            kept_random_state=random_states() == states,
            kept_threads=(torch.set_num_threads, torch.get_num_threads()) == threads,
            starts_equal=largest_difference(model, prompts, generate(engine, prompts)) < TOLERANCE,
        )
        engine.close()


@pytest.fixture
def fresh(built) -> SimpleNamespace:
    """The same, with the initial weights on both sides."""
    built.model.load_state_dict(built.initial, strict=False)
    if built.engine.policy_version != 0:
        sync_weights(built.engine, built.initial.items(), policy_version=0)
    return built


def make_prompts(count: int, length: int = 9) -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [
        Prompt(f"p{i}", tuple(generator.integers(2, VOCAB, length).tolist()), answer="")
        for i in range(count)
    ]


def generate(engine: RolloutEngine, prompts: list[Prompt], **changes: object):
    settings = {"num_samples": 4, "seed": 7, "step": 0, "max_response_tokens": 24} | changes
    return engine.generate(prompts, **settings)


def expected_log_probs(
    model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    tokens = torch.tensor([*prompt, *response]).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].float() / temperature
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
    return logits.log_softmax(-1)[rows, tokens[len(prompt) :]].numpy()


def trainer_log_probs(model, prompt_ids, response_ids) -> list[np.ndarray]:
    return [expected_log_probs(model, p, r) for p, r in zip(prompt_ids, response_ids, strict=True)]


def largest_difference(model, prompts, groups, temperature: float = 1.0) -> float:
    return max(
        np.abs(
            expected_log_probs(model, prompt.token_ids, r.token_ids, temperature) - r.log_probs
        ).max()
        for prompt, group in zip(prompts, groups, strict=True)
        for r in group
    )


def tokens_of(groups) -> list[list[list[int]]]:
    return [[r.token_ids.tolist() for r in group] for group in groups]


def perturb(model: PreTrainedModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def sequences(engine: RolloutEngine, count: int = 3):
    prompts = make_prompts(count)
    responses = [group[0].token_ids for group in generate(engine, prompts, num_samples=1)]
    return [np.array(p.token_ids, dtype=np.int32) for p in prompts], responses


# --- sampling ----------------------------------------------------------------------------------


def test_the_cache_is_as_large_as_the_config_says(built):
    """In bytes, and in blocks: those of two layers, keys and values in float32."""
    cache = built.engine.llm.vllm_config.cache_config
    num_bytes = built.engine.config.rollout.cpu_kv_cache_gib * 2**30
    assert num_bytes == 2**30 == cache.kv_cache_memory_bytes
    hf_config = built.model.config
    width = hf_config.num_key_value_heads * Geometry.of(hf_config).head_dim
    token_bytes = 2 * hf_config.num_hidden_layers * width * 4
    assert cache.num_gpu_blocks == num_bytes // (token_bytes * cache.block_size)


def test_log_probs_are_those_of_the_distribution_sampled_from(fresh):
    prompts = make_prompts(4)
    for temperature in (1.0, 0.6):
        groups = generate(fresh.engine, prompts, temperature=temperature)
        assert largest_difference(fresh.model, prompts, groups, temperature) < TOLERANCE


def test_samples_follow_the_model(fresh):
    # 4000 first tokens of one prompt against the model's own distribution: Pearson's chi-square
    # over tokens expected at least 10 times. With 15 of them, 2.5 per token has probability 1e-3,
    # and the seeds are fixed; a sampler at temperature 0.9 gives more than 5.
    (prompt,) = make_prompts(1)
    (group,) = generate(fresh.engine, [prompt], num_samples=4000, max_response_tokens=1)
    counts = Counter(int(r.token_ids[0]) for r in group)
    with torch.no_grad():
        logits = fresh.model(torch.tensor([prompt.token_ids])).logits[0, -1]
    expected = 4000 * logits.softmax(-1).numpy()
    frequent = np.flatnonzero(expected >= 10)
    observed = np.array([counts[int(token)] for token in frequent])
    assert len(frequent) > 5
    assert ((observed - expected[frequent]) ** 2 / expected[frequent]).sum() < 2.5 * len(frequent)


def test_same_seed_gives_the_same_samples_and_others_differ(fresh):
    prompts = make_prompts(3)
    first, again = generate(fresh.engine, prompts), generate(fresh.engine, prompts)
    for group, repeated in zip(first, again, strict=True):
        for r, s in zip(group, repeated, strict=True):
            assert r.token_ids.tolist() == s.token_ids.tolist()
            assert r.log_probs.tolist() == s.log_probs.tolist()
    assert tokens_of(generate(fresh.engine, prompts, step=1)) != tokens_of(first)
    assert tokens_of(generate(fresh.engine, prompts, seed=8)) != tokens_of(first)
    for group in tokens_of(first):
        assert len({tuple(tokens) for tokens in group}) > 1


def test_samples_depend_neither_on_order_nor_on_company(fresh):
    prompts = make_prompts(6)
    groups = tokens_of(generate(fresh.engine, prompts))
    assert tokens_of(generate(fresh.engine, prompts[::-1])) == groups[::-1]
    assert tokens_of(generate(fresh.engine, prompts[2:3])) == groups[2:3]
    fewer = tokens_of(generate(fresh.engine, prompts, num_samples=2))
    assert fewer == [group[:2] for group in groups]


# Attribute of vLLM's scheduler: requests that it lets run at a time.
LIMIT = "max_num_active_reqs"
# Two responses that nearly always end by themselves: groups are whole at different times.
LONG = {"num_samples": 2, "max_response_tokens": 150}


def test_ends_with_as_many_whole_groups_as_are_wanted(fresh):
    prompts = make_prompts(16)
    everything = tokens_of(generate(fresh.engine, prompts, **LONG))
    groups = generate(fresh.engine, prompts, num_groups=5, **LONG)
    kept = [i for i, group in enumerate(groups) if all(r.finished for r in group)]
    assert tokens_of(groups[i] for i in kept) == [everything[i] for i in kept]
    # All begin at once, so the longest response of a group says when it is whole.
    longest = [max(map(len, group)) for group in everything]
    last = sorted(longest)[4]
    assert kept == [i for i, n in enumerate(longest) if n <= last]
    others = [n for i, n in enumerate(longest) if i not in kept]
    assert last < min(others) < max(others)
    assert not fresh.engine.llm.has_unfinished_requests()
    assert tokens_of(generate(fresh.engine, prompts, num_groups=0)) == [[[]] * 4] * 16


def test_what_is_broken_off_goes_on_from_its_tokens_at_other_weights(fresh):
    engine, prompts = fresh.engine, make_prompts(16)
    everything = tokens_of(generate(engine, prompts, **LONG))
    first = generate(engine, prompts, num_groups=5, **LONG)
    opened = [i for i, group in enumerate(first) if not all(r.finished for r in group)]
    assert 0 < len(opened) <= 11
    for group, whole in zip(first, everything, strict=True):
        for r, tokens in zip(group, whole, strict=True):
            assert r.token_ids.tolist() == tokens[: len(r.token_ids)]
            assert r.finished == (len(r.token_ids) == len(tokens))
            assert len(r.log_probs) == len(r.token_ids) and r.carried is None
            assert not r.truncated or r.finished
    rollouts = [r for i in opened for r in first[i]]
    assert {r.finished for r in rollouts} == {True, False}
    assert not engine.llm.has_unfinished_requests()
    prompts = [prompts[i] for i in opened]
    before = [first[i] for i in opened]
    assert largest_difference(fresh.model, prompts, before) < TOLERANCE

    perturb(fresh.model, seed=4)
    sync_weights(engine, weights(fresh.model).items(), policy_version=1)
    begun = {prompt.id: group for prompt, group in zip(prompts, before, strict=True)}
    new = [Prompt("new", (5, 6, 7), answer="")]
    *after, fresh_group = generate(engine, [*prompts, *new], step=1, begun=begun, **LONG)
    assert tokens_of([fresh_group]) == tokens_of(generate(engine, new, step=1, **LONG))
    for prompt, group, earlier in zip(prompts, after, before, strict=True):
        for r, start in zip(group, earlier, strict=True):
            n = len(start.token_ids)
            assert r.finished and (r is start) == start.finished
            assert r.token_ids[:n].tolist() == start.token_ids.tolist()
            # Of the weights of its version each: the first ones have not been scored again.
            assert r.log_probs[:n].tolist() == start.log_probs.tolist()
            now = expected_log_probs(fresh.model, prompt.token_ids, r.token_ids)
            assert np.abs(now[n:] - r.log_probs[n:]).max(initial=0) < TOLERANCE
            assert r.truncated == (int(r.token_ids[-1]) not in fresh.ends)
            assert len(r.token_ids) <= 150 and (len(r.token_ids) == 150 or not r.truncated)
            assert (r.token_ids.dtype, r.log_probs.dtype) == (np.int32, np.float32)
    assert largest_difference(fresh.model, prompts, before) > 0.05


def test_responses_are_handed_over_when_they_end_and_once(fresh):
    engine, prompts = fresh.engine, make_prompts(16)
    calls, still_running = [], []

    def on_ended(ended) -> None:
        calls.append(list(ended))
        still_running.append(engine.llm.has_unfinished_requests())

    def handed_over() -> dict[tuple[str, int], Rollout]:
        everything = [one for ended in calls for one in ended]
        assert len({(prompt.id, sample) for prompt, sample, _ in everything}) == len(everything)
        return {(prompt.id, sample): rollout for prompt, sample, rollout in everything}

    def finished(groups) -> dict[tuple[str, int], Rollout]:
        return {
            (prompt.id, sample): rollout
            for prompt, group in zip(prompts, groups, strict=True)
            for sample, rollout in enumerate(group)
            if rollout.finished
        }

    first = generate(engine, prompts, num_groups=5, on_ended=on_ended, **LONG)
    assert handed_over() == finished(first)  # the same objects: rollouts are equal to no other
    assert sum(map(bool, calls)) > 3 and [] in calls
    assert not still_running[0] and all(still_running[1:])
    calls.clear()
    begun = {prompt.id: group for prompt, group in zip(prompts, first, strict=True)}
    rest = generate(engine, prompts, begun=begun, on_ended=on_ended, step=1, **LONG)
    assert handed_over() == finished(rest) and len(finished(rest)) == 32
    assert len(calls[0]) == len(finished(first))

    def fail(ended) -> None:
        if ended:
            raise RewardError("no worker can start")

    with pytest.raises(RewardError):
        generate(engine, prompts, on_ended=fail)
    assert not engine.llm.has_unfinished_requests()


def test_a_decoding_step_may_wait_for_the_verdicts_on_what_ended_before(fresh, monkeypatch):
    """Then all are there, before the last response ends: none waits for the others."""
    engine, prompts = fresh.engine, make_prompts(4)
    tokenizer = SimpleNamespace(
        batch_decode=lambda all_ids, **_: [f"echo {ids}" for ids in all_ids]
    )
    step, num_judged = engine.llm.step, []
    with Pool("tests.reward_setup", num_workers=1, timeout_s=600) as pool:
        judging = Judging(pool, prompts, tokenizer=tokenizer)

        def is_judged() -> bool:
            judging.add([])
            return not pool._open

        def step_when_judged():
            wait_until(is_judged, "verdicts on what has ended")
            num_judged.append(len(pool._verdicts))
            return step()

        monkeypatch.setattr(engine.llm, "step", step_when_judged)
        groups = generate(engine, prompts, on_ended=judging.add, **LONG)
        verdicts = score(judging, prompts, groups)
    assert len(set(num_judged)) > 3 and 0 < num_judged[-1] < 8
    assert [[verdict.reason for verdict in group] for group in verdicts] == [
        [f"{tokens} for "[:500] for tokens in group] for group in tokens_of(groups)
    ]


def test_an_engine_that_has_ended_hands_over_until_the_last_one_has(fresh, monkeypatch):
    """Nothing new; but nobody else would feed the workers."""
    calls = []

    class Waits(Heartbeat):
        def wait_for_all(self, *, on_beat, meanwhile) -> None:
            assert not fresh.engine.llm.has_unfinished_requests()
            before = len(calls)
            meanwhile()
            assert calls[before:] == [()]
            num_asked = len(asked)
            on_beat()
            assert len(asked) == num_asked + 1
            super().wait_for_all(on_beat=on_beat, meanwhile=meanwhile)

    asked = []
    monkeypatch.setattr(engine_module, "Heartbeat", Waits)
    generate(fresh.engine, make_prompts(2), on_ended=calls.append, should_abandon=asked.append)
    assert calls[-1] == ()


def test_what_has_not_begun_is_open_without_a_token(fresh):
    groups = generate(fresh.engine, make_prompts(3), num_groups=0)
    assert tokens_of(groups) == [[[]] * 4] * 3
    assert not any(r.finished or r.truncated for group in groups for r in group)
    begun = {f"p{i}": group for i, group in enumerate(groups)}
    again = generate(fresh.engine, make_prompts(3), begun=begun)
    assert tokens_of(again) == tokens_of(generate(fresh.engine, make_prompts(3)))
    # All that is wanted is there already: nothing is generated for the others.
    done = generate(
        fresh.engine,
        make_prompts(5),
        num_groups=3,
        begun={f"p{i}": group for i, group in enumerate(again)},
    )
    assert tokens_of(done) == [*tokens_of(again), [[]] * 4, [[]] * 4]


def test_counts_the_places_that_stand_empty(fresh, monkeypatch):
    """By a clock that a decoding step takes a second of."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    step = fresh.engine.llm.step

    def step_for_a_second():
        clock.now += 1
        return step()

    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(fresh.engine.llm, "step", step_for_a_second)

    def occupy(occupancy: Occupancy, num_prompts: int) -> list[int]:
        """Lengths of the responses, in the order of the requests."""
        groups = generate(
            fresh.engine,
            make_prompts(num_prompts),
            occupancy=occupancy,
            should_abandon=lambda seconds: False,
        )
        return [len(tokens) for group in tokens_of(groups) for tokens in group]

    occupancy = Occupancy()
    lengths = occupy(occupancy, 16)
    # All begin at once: a response takes one of 64 places for as many seconds as it has tokens.
    assert occupancy.there_s == max(lengths)
    assert occupancy.taken_s == pytest.approx(sum(lengths) / 64)
    assert occupancy.idle_share == pytest.approx(1 - sum(lengths) / 64 / max(lengths))
    # A further call of the step has fewer requests, and as many places.
    more = occupy(occupancy, 2)
    assert occupancy.there_s == max(lengths) + max(more)
    assert occupancy.taken_s == pytest.approx((sum(lengths) + sum(more)) / 64)

    # Of more requests than there are places some wait: none is empty until the last has begun.
    monkeypatch.setattr(fresh.engine.llm.engine_core.engine_core.scheduler, LIMIT, 10)
    occupancy = Occupancy()
    assert occupy(occupancy, 16) == lengths
    waiting, running, taken = list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < 10:
            running.append(waiting.pop(0))
        taken.append(1 if waiting else len(running) / 10)
        running = [left - 1 for left in running if left > 1]
    assert occupancy.there_s == len(taken)
    assert occupancy.taken_s == pytest.approx(sum(taken))
    assert 0 < occupancy.idle_share < 0.5


def test_responses_end_at_eos_or_are_truncated(fresh):
    prompts = make_prompts(16)
    rollouts = [r for group in generate(fresh.engine, prompts, num_samples=8) for r in group]
    assert {r.truncated for r in rollouts} == {True, False}
    assert fresh.ends <= {int(r.token_ids[-1]) for r in rollouts}
    for r in rollouts:
        assert not fresh.ends & set(r.token_ids[:-1].tolist())
        assert r.truncated == (int(r.token_ids[-1]) not in fresh.ends)
        assert len(r.token_ids) == len(r.log_probs) <= 24
        assert not r.truncated or len(r.token_ids) == 24
        assert (r.token_ids.dtype, r.log_probs.dtype) == (np.int32, np.float32)


def test_nucleus_keeps_only_likely_tokens_and_renormalises(fresh):
    (prompt,) = make_prompts(1)
    (group,) = generate(fresh.engine, [prompt], num_samples=200, max_response_tokens=1, top_p=0.3)
    with torch.no_grad():
        probs = fresh.model(torch.tensor([prompt.token_ids])).logits[0, -1].softmax(-1)
    order = probs.argsort(descending=True)
    size = int((probs[order].cumsum(0) < 0.3).sum()) + 1
    nucleus = order[:size].tolist()
    assert {int(r.token_ids[0]) for r in group} <= set(nucleus)
    renormalised = (probs / probs[nucleus].sum()).log()
    for r in group:
        assert abs(float(renormalised[int(r.token_ids[0])]) - float(r.log_probs[0])) < TOLERANCE


def test_more_tokens_than_one_engine_step_takes(fresh):
    # A seeded prompt cut in two by the step's budget fails on a CPU; whole prompts wait instead.
    scheduler = fresh.engine.llm.vllm_config.scheduler_config
    assert not scheduler.enable_chunked_prefill
    count = scheduler.max_num_batched_tokens // 100 + 1  # ends inside a prompt
    prompts = make_prompts(count, length=100)
    groups = generate(fresh.engine, prompts, num_samples=1, max_response_tokens=2)
    assert len(groups) == count


def test_the_trainer_keeps_its_generators_and_its_threads(built):
    assert built.kept_random_state
    assert built.kept_threads
    state = torch.get_rng_state()
    generate(built.engine, make_prompts(2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("token_ids", "named"),
    [
        ((), r"'bad'.*\b0\b.*\b140\b"),
        ((2,) * 141, r"'bad'.*\b141\b.*\b140\b"),
        ((2, VOCAB), rf"'bad'.*\b{VOCAB}\b.*\b{VOCAB - 1}\b"),
        ((2, -1), rf"'bad'.*-1\b.*\b{VOCAB - 1}\b"),
    ],
)
def test_bad_prompts_are_named_before_generation(built, monkeypatch, token_ids, named):
    monkeypatch.setattr(built.engine, "_run", lambda *_: pytest.fail("generated"))
    with pytest.raises(DataError, match=named):
        generate(built.engine, [*make_prompts(1), Prompt(id="bad", token_ids=token_ids, answer="")])


def test_a_generation_can_be_broken_off_and_repeated(fresh):
    prompts = make_prompts(2)
    whole = tokens_of(generate(fresh.engine, prompts))
    asked: list[float] = []

    def after_two_questions(elapsed_s: float) -> bool:
        asked.append(elapsed_s)
        return len(asked) == 2

    assert generate(fresh.engine, prompts, should_abandon=after_two_questions) is None
    assert 0 <= asked[0] < asked[1]
    assert not fresh.engine.llm.has_unfinished_requests()
    again = generate(fresh.engine, prompts, should_abandon=lambda elapsed_s: False)
    assert tokens_of(again) == whole


def test_an_interrupted_generation_leaves_no_request_behind(fresh, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fresh.engine.llm, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            generate(fresh.engine, make_prompts(2))
    assert not fresh.engine.llm.has_unfinished_requests()
    assert len(generate(fresh.engine, make_prompts(2))) == 2


# --- weights -----------------------------------------------------------------------------------


def test_scored_log_probs_equal_those_of_transformers(fresh):
    prompt_ids, response_ids = sequences(fresh.engine)
    # The longest sequence there may be, scored from its second token on.
    prompt_ids.append(np.array([5], dtype=np.int32))
    response_ids.append(np.arange(163, dtype=np.int32) % VOCAB)
    scored = fresh.engine.log_probs(prompt_ids, response_ids)
    for prompt, response, values in zip(prompt_ids, response_ids, scored, strict=True):
        assert values.dtype == np.float32
        assert np.abs(expected_log_probs(fresh.model, prompt, response) - values).max() < TOLERANCE


def test_synced_weights_are_the_ones_generated_with(fresh):
    # Longer than a block of the KV cache (128 on a CPU): what is cached of the old weights must go.
    prompts = make_prompts(3, length=140)
    for version in (1, 2, 3):
        perturb(fresh.model, seed=version)
        stale = largest_difference(fresh.model, prompts, generate(fresh.engine, prompts))
        assert stale > 0.05
        sync_weights(fresh.engine, weights(fresh.model).items(), policy_version=version)
        assert fresh.engine.policy_version == version
        groups = generate(fresh.engine, prompts)
        assert largest_difference(fresh.model, prompts, groups) < TOLERANCE


def test_weights_synced_from_megatron_names(fresh):
    rules = rules_for(fresh.engine.hf_config)
    perturb(fresh.model, seed=9)
    whole = to_megatron(rules, weights(fresh.model).items())
    sync_weights(fresh.engine, to_hf(rules, whole), policy_version=1)
    prompts = make_prompts(2)
    assert largest_difference(fresh.model, prompts, generate(fresh.engine, prompts)) < TOLERANCE


def test_verify_passes_equal_weights_and_reports_the_noise(fresh):
    prompt_ids, response_ids = sequences(fresh.engine)
    expected = trainer_log_probs(fresh.model, prompt_ids, response_ids)
    check = verify_weights(fresh.engine, prompt_ids, response_ids, expected)
    assert 0.0 < check.mean_abs_diff <= check.max_abs_diff < TOLERANCE


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"]
)
def test_a_corrupted_weight_is_found(fresh, name):
    prompt_ids, response_ids = sequences(fresh.engine)
    expected = trainer_log_probs(fresh.model, prompt_ids, response_ids)
    corrupted = weights(fresh.model)
    corrupted[name][3] += 0.5
    sync_weights(fresh.engine, corrupted.items(), policy_version=5)
    actual = fresh.engine.log_probs(prompt_ids, response_ids)
    with pytest.raises(WeightSyncError, match=r"\bversion 5\b") as caught:
        verify_weights(fresh.engine, prompt_ids, response_ids, expected)
    diffs = [np.abs(a - b) for a, b in zip(actual, expected, strict=True)]
    sequence = int(np.argmax([diff.mean() for diff in diffs]))
    token = int(diffs[sequence].argmax())
    trainer, engine = (values[sequence][token] for values in (expected, actual))
    places = (f"sequence {sequence} ", f"token {token}:")
    values = (f"trainer {trainer:.6f}", f"engine {engine:.6f}")
    assert re.search(mentions(*places, *values), str(caught.value))


def test_a_value_that_is_not_finite_never_passes(fresh):
    prompt_ids, response_ids = sequences(fresh.engine)
    expected = [np.full(len(response), np.nan, np.float32) for response in response_ids]
    with pytest.raises(WeightSyncError, match=r"\binf\b.*\btrainer nan\b"):
        verify_weights(fresh.engine, prompt_ids, response_ids, expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), mentions("missing", "model.norm.weight")),
        (lambda w: w.update(extra=torch.zeros(1)), r"\bextra\b"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(7)}),
            r"\bmodel\.norm\.weight\b.*\[7\]",
        ),
    ],
)
def test_a_sync_of_other_tensors_is_an_error_and_the_next_one_mends_it(fresh, change, named):
    tensors = weights(fresh.model)
    change(tensors)
    with pytest.raises(WeightSyncError, match=named):
        sync_weights(fresh.engine, tensors.items(), policy_version=4)
    assert fresh.engine.policy_version == -1
    sync_weights(fresh.engine, weights(fresh.model).items(), policy_version=5)
    prompts = make_prompts(2)
    assert largest_difference(fresh.model, prompts, generate(fresh.engine, prompts)) < TOLERANCE


def test_an_exported_folder_loads_in_vllm(built):
    assert built.starts_equal


# --- turns -------------------------------------------------------------------------------------


def test_a_sleeping_engine_wakes_by_a_sync(fresh):
    prompts = make_prompts(2)
    before = tokens_of(generate(fresh.engine, prompts))
    fresh.engine.sleep()
    with pytest.raises(RolloutError, match=mentions("generate", "sleeping")):
        generate(fresh.engine, prompts)
    with pytest.raises(RolloutError, match=mentions("log_probs", "sleeping")):
        fresh.engine.log_probs([np.array([2])], [np.array([3])])
    sync_weights(fresh.engine, weights(fresh.model).items(), policy_version=1)
    assert tokens_of(generate(fresh.engine, prompts)) == before


def test_what_was_received_may_go_before_the_cache_comes(fresh):
    seen = []

    def tensors():
        yield from weights(fresh.model).items()
        seen.append("all are sent")

    fresh.engine.sleep()
    phase = fresh.engine.schedule
    sync_weights(
        fresh.engine, tensors(), policy_version=1, on_received=lambda: seen.append(phase.phase)
    )
    assert seen == ["all are sent", Phase.RECEIVING]
    assert phase.phase is Phase.GENERATING


def test_on_a_gpu_weights_wake_before_the_cache(monkeypatch):
    calls: list[tuple[str, object]] = []
    engine = SimpleNamespace(
        sleep=lambda level: calls.append(("sleep", level)),
        wake_up=lambda tags: calls.append(("wake_up", tags)),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(("empty_cache", None)))
    schedule = Schedule(engine, torch.device("cuda", 0))
    schedule.wake_for_sync()
    schedule.wake_for_generation()
    assert calls == []  # awake: weights are overwritten in place
    schedule.sleep()
    schedule.sleep()
    schedule.wake_for_sync()
    assert schedule.phase is Phase.RECEIVING
    schedule.wake_for_generation()
    assert schedule.phase is Phase.GENERATING
    assert [call for call in calls if call[0] != "empty_cache"] == [
        ("sleep", 2),
        ("wake_up", ["weights"]),
        ("wake_up", ["kv_cache"]),
    ]
    assert [call[0] for call in calls].count("empty_cache") == 2


# --- what is checked before an engine is built ---------------------------------------------------


def test_eos_tokens_come_from_both_files(tmp_path):
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 6}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    assert eos_token_ids(tmp_path, config["vocab_size"]) == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert eos_token_ids(tmp_path, config["vocab_size"]) == (3, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 6]}))
    with pytest.raises(ConfigError, match=mentions("generation_config.json", "eos_token_id", 6)):
        eos_token_ids(tmp_path, config["vocab_size"])
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(tmp_path, config["vocab_size"])


@pytest.mark.parametrize("damage", ["model.safetensors", "config.json"])
def test_an_incomplete_model_folder_is_named_before_vllm_starts(tmp_path, damage):
    model = make_model(True)
    model.save_pretrained(tmp_path)
    (tmp_path / damage).unlink()
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        check_engine(make_config(tmp_path), model.config, CPU, world_size=1)


def test_rollout_tensor_parallelism_must_fit(tmp_path):
    model, config = make_model(True), make_config(tmp_path, tensor_parallel_size=2)
    named = mentions("rollout.tensor_parallel_size", 2, "world size", 1)
    with pytest.raises(ConfigError, match=named):
        check_engine(config, model.config, CPU, world_size=1)


def test_a_head_dim_vllm_has_no_kernel_for_is_a_config_error(tmp_path):
    config = LlamaConfig(**SIZES, head_dim=16)
    with pytest.raises(ConfigError, match=r"\bhead_dim\b.*\b16\b.*\b32\b.*\b64\b"):
        check_engine(make_config(tmp_path), config, CPU, world_size=1)


def test_a_cache_larger_than_the_machine_is_a_config_error(tmp_path):
    config = make_config(tmp_path, cpu_kv_cache_gib=10**6)
    with pytest.raises(ConfigError, match=mentions("rollout.cpu_kv_cache_gib", 10**6)):
        check_engine(config, make_model(True).config, CPU, world_size=1)


def test_sequences_beyond_the_trained_positions_are_warned_about(tmp_path, caplog):
    config = make_config(tmp_path)
    assert make_args(config, LlamaConfig(**SIZES), CPU).max_model_len == 165
    assert not caplog.records
    short = LlamaConfig(**SIZES | {"max_position_embeddings": 100})
    args = make_args(config, short, CPU)
    assert args.hf_overrides == {"max_position_embeddings": 165}
    long = LlamaConfig(**SIZES | {"max_position_embeddings": 2**31 - 1})
    args = make_args(make_config(tmp_path), long, CPU)
    assert args.hf_overrides == {"max_position_embeddings": 165} and not args.trust_remote_code
    settings = ("data.max_prompt_tokens", "rollout.max_response_tokens")
    assert re.search(mentions(*settings, 164, 100), caplog.messages[-1])


def test_gpu_memory_is_a_fraction_and_can_be_given_back(tmp_path):
    config = make_config(tmp_path, memory_fraction=0.3)
    args = make_args(config, LlamaConfig(**SIZES), torch.device("cuda"))
    assert (args.gpu_memory_utilization, args.enable_sleep_mode) == (0.3, True)
    assert args.sleep_mode_offload_cudagraph


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_on_a_gpu_vllm_has_its_logits_in_fp32(tmp_path, quantization):
    """As the trainer's head; what vLLM makes of the override on a CPU is enough to see it."""
    model = make_model(True)
    model.save_pretrained(tmp_path)
    config = make_config(tmp_path, precision="bf16", quantization=quantization)
    args = make_args(config, model.config, torch.device("cuda"))
    assert args.hf_overrides["head_dtype"] == "float32"
    args.enable_sleep_mode = False  # the one that a CPU refuses
    made = args.create_model_config()
    assert (made.dtype, made.head_dtype) == (torch.bfloat16, torch.float32)
    assert "head_dtype" not in make_args(config, model.config, CPU).hf_overrides


@pytest.mark.parametrize(
    ("precision", "rollout", "has_experts", "expected"),
    [
        ("fp32", {}, False, {"cpu": 1e-3, "cuda": 1e-2}),  # TF32, in vLLM's attention
        (
            "fp32",
            {},
            True,
            {"cpu": 1e-3, "cuda": 1e-2},
        ),  # nothing rounds so far that other experts are chosen
        ("bf16", {}, False, 0.1),
        ("bf16", {}, True, 0.3),
        ("bf16", {"quantization": "fp8"}, False, 0.3),
        ("fp8", {}, False, 0.3),
        ("bf16", {"quantization": "fp8", "verify_bound": 0.02}, True, 0.02),
    ],
)
def test_the_bound_of_a_sync_goes_by_what_rounds(
    tmp_path, precision, rollout, has_experts, expected
):
    hf_config = Qwen3MoeConfig(**SIZES) if has_experts else LlamaConfig(**SIZES)
    config = make_config(tmp_path, precision=precision, **{"verify_bound": None, **rollout})
    for device in ("cpu", "cuda"):
        bound = expected[device] if isinstance(expected, dict) else expected
        assert verify_bound(config, hf_config, torch.device(device)) == bound


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_come_by_the_first_sync_unless_asked_for(tmp_path, device):
    config, hf_config = make_config(tmp_path), LlamaConfig(**SIZES)
    formats = [
        engine_args(config, hf_config, torch.device(device), load_weights=load).load_format
        for load in (False, True)
    ]
    assert formats == ["dummy", "auto"]


def test_only_a_cpu_with_a_kernel_for_it_generates_in_fp8(tmp_path, monkeypatch):
    model = make_model(True)
    model.save_pretrained(tmp_path)
    plain = make_args(make_config(tmp_path), model.config, CPU)
    assert (plain.quantization, plain.quantization_config) == (None, None)
    config = make_config(tmp_path, precision="bf16", quantization="fp8")
    args = make_args(config, model.config, CPU)
    assert (args.quantization, args.dtype) == ("fp8_per_block", "bfloat16")
    assert args.quantization_config.ignore == ["*.gate"]
    check_engine(make_config(tmp_path), model.config, CPU, world_size=1)
    check_engine(config, model.config, torch.device("cuda"), world_size=1)
    llama = make_model(False).config
    for of_model, answer, reason in [
        (llama, (True, None), None),
        (llama, (False, "requires AMX"), "requires AMX"),
        (model.config, (True, None), "biases"),
    ]:
        monkeypatch.setattr(
            vllm_internals.CPUFp8BlockScaledMMKernel, "is_supported", lambda answer=answer: answer
        )
        if reason is None:
            check_engine(config, of_model, CPU, world_size=1)
            continue
        named = mentions("rollout.quantization", "'fp8'", "CPU", reason)
        with pytest.raises(ConfigError, match=named):
            check_engine(config, of_model, CPU, world_size=1)


def test_seeds_are_fixed_and_apart():
    assert request_seed(0, 0, "p", 0) == 105696400331299797
    seeds = {
        request_seed(run, step, prompt, sample)
        for run in range(3)
        for step in range(5)
        for prompt in ("1", "11", "p")
        for sample in range(8)
    }
    # Going on, also within the step that has begun, meets other random numbers.
    seeds |= {request_seed(0, 0, "p", 0, start) for start in range(1, 10)}
    assert len(seeds) == 3 * 5 * 3 * 8 + 9
    assert request_seed(0, 0, "p", 0, 0) == request_seed(0, 0, "p", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)


def beats(folder: str) -> int:
    """Rank 0 has ended; rank 1 generates, is frozen for a while, and ends."""
    heart = Heartbeat(dist.group.WORLD)
    lively, frozen, thawed = (Path(folder, name) for name in ("lively", "frozen", "thawed"))
    if dist.get_rank() == 1:

        def is_lively() -> bool:
            heart.beat(ended=False)
            return lively.exists()

        wait_until(is_lively, "rank 0 to see beats")
        frozen.touch()
        wait_until(thawed.exists, "rank 0 to have looked")
        heart.wait_for_all(on_beat=lambda: None, meanwhile=lambda: None)
        return 0

    wait_until(lambda: heart.beat(ended=True), "a beat of rank 1")
    wait_until(lambda: heart.beat(ended=True), "another")
    lively.touch()
    wait_until(frozen.exists, "rank 1 to freeze")
    num_beats = sum(heart.beat(ended=True) for _ in range(1000))
    assert not heart.all_ended
    thawed.touch()
    heart.wait_for_all(on_beat=lambda: None, meanwhile=lambda: None)
    return num_beats


def test_a_rank_that_freezes_while_it_generates_is_missed(tmp_path):
    """Its own watch is frozen with it, so the others must not wait for it for ever."""
    num_beats, _ = run_distributed(beats, 2, str(tmp_path))
    assert num_beats <= 1, "at most the one that was under way"


# --- several ranks -------------------------------------------------------------------------------


def two_ranks(folder: str, tp_size: int):
    cores = share_of_cores()  # before vLLM binds its threads to some of them
    os.environ.update(vllm_environment(dist.get_rank(), dist.get_world_size()))
    engine = build_engine(make_config(Path(folder), tensor_parallel_size=tp_size))
    shared_memory = re.findall(
        r"/dev/shm/(\S*cpushm\S*|gapo\S*)", Path("/proc/self/maps").read_text()
    )
    prompts = make_prompts(5)
    mine = engine.share(prompts)
    groups = engine.part(list(zip(mine, generate(engine, mine), strict=True)))
    gathered = engine.gather(groups)
    alone = tokens_of(generate(engine, prompts))
    abandoned = [
        generate(engine, mine, should_abandon=lambda _, rank=rank: dist.get_rank() == rank) is None
        for rank in range(2)
    ]
    calls = []
    first = generate(engine, mine, num_groups=1, on_ended=calls.append, **LONG)
    begun = {prompt.id: group for prompt, group in zip(mine, first, strict=True)}
    rest = generate(engine, mine, begun=begun, step=1, **LONG)
    rest_ids = [r.token_ids for group in rest for r in group]
    scored = engine.log_probs([np.array(p.token_ids) for p in mine for _ in range(2)], rest_ids)
    again = tokens_of(generate(engine, prompts))
    model = make_model(False)
    perturb(model, seed=1)
    sync_weights(engine, weights(model).items(), policy_version=1)
    tuned = generate(engine, mine)
    message = ""
    prompt_ids = [np.array(prompt.token_ids) for prompt in prompts]
    response_ids = [group[0].token_ids for _, group in gathered]
    expected = trainer_log_probs(model, prompt_ids, response_ids)
    check = verify_weights(engine, prompt_ids, response_ids, expected)
    if dist.get_rank() == 1:
        expected[2] = expected[2] + 1.0
    try:
        verify_weights(engine, prompt_ids, response_ids, expected)
    except WeightSyncError as error:
        message = str(error)
    return {
        "mine": [prompt.id for prompt in mine],
        "part": [prompt.id for prompt, _ in groups],
        "cores": cores,
        "ids": [prompt.id for prompt, _ in gathered],
        "alone": alone,
        "tokens": tokens_of([group for _, group in gathered]),
        "abandoned": abandoned,
        "ended": [[(prompt.id, sample) for prompt, sample, _ in ended] for ended in calls],
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
    if tp_size == 2:  # ranks of one engine have broken off together, and hold the same
        for name in ("first", "ended", "rest"):
            assert results[0][name] == results[1][name]
    # Either way each rank has its own to judge.
    assert [result["part"] for result in results] == [["p0", "p1"], ["p2", "p3", "p4"]]
    for result in results:
        assert result["cores"] == max(1, len(os.sched_getaffinity(0)) // 2)
    for result in results:
        assert result["ids"] == ["p0", "p1", "p2", "p3", "p4"]
        assert result["tokens"] == result["alone"]
        # All break off together; in a replica its first rank speaks for all.
        assert result["abandoned"] == [True, tp_size == 1]
        # Broken off after a group is whole, and gone on with.
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
        assert len(names) == (2 if tp_size == 2 else 0)
        assert all(re.match(r"gapo_megatron-[0-9a-f]{32}-tp:\d+-0-1_[01]$", name) for name in names)


def sync_experts(folder: str):
    os.environ.update(vllm_environment(0, 1))
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, head_dim=32, norm_topk_prob=True, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(f"{folder}/0")
    engine = build_engine(make_config(Path(folder, "0")), load_weights=False)
    with pytest.raises(RolloutError, match=mentions("generate", "sleeping")):
        sequences(engine)
    sync_weights(engine, load_file(f"{folder}/0/model.safetensors").items(), policy_version=0)
    prompt_ids, response_ids = sequences(engine)
    differences = []
    for version in (1, 2):
        perturb(model, seed=version)
        model.save_pretrained(f"{folder}/{version}")  # under the names of single experts
        tensors = load_file(f"{folder}/{version}/model.safetensors")
        sync_weights(engine, tensors.items(), policy_version=version)
        expected = trainer_log_probs(model, prompt_ids, response_ids)
        check = verify_weights(engine, prompt_ids, response_ids, expected)
        differences.append(check.max_abs_diff)
    return differences


@pytest.mark.system
def test_synced_experts_are_the_ones_generated_with(tmp_path):
    """They are packed for the CPU's kernel when the engine is built, and anew by every sync."""
    (differences,) = run_distributed(sync_experts, 1, str(tmp_path))
    assert len(differences) == 2
    assert all(0.0 < difference < TOLERANCE for difference in differences)
