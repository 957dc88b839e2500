"""A real vLLM engine with two tiny models: sampling, weights and turns."""

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.model_executor.models import ModelRegistry, registry

from gapo_megatron.errors import RolloutError, WeightSyncError
from gapo_megatron.formats.weights import write_hf
from gapo_megatron.models.tables import geometry_of
from gapo_megatron.rollout.calls import in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.rollout.vllm import weights as weights_module
from gapo_megatron.rollout.vllm.schedule import Phase, Schedule
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Prompt
from tests.acting import calls_of
from tests.alternatives import check_alternatives
from tests.messages import mentions
from tests.rollout_setup import (
    EOS,
    LONG,
    TOLERANCE,
    VOCAB,
    build_engine,
    expected_log_probs,
    generate,
    largest_difference,
    make_config,
    make_model,
    make_prompts,
    perturb,
    process_group,
    random_states,
    sequences,
    tokens_of,
    trainer_log_probs,
    update_weights,
    weights,
)
from tests.two_turn import TwoTurn
from tests.waiting import HANG_S


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.system)],
    ids=["tied", "untied"],
)
def built(request, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """An engine started from a folder that this package wrote, and its transformers model."""
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
        update_weights(built.engine, built.initial.items(), policy_version=0)
    return built


# --- sampling ----------------------------------------------------------------------------------


def test_its_model_was_inspected_in_this_process(built, monkeypatch):
    """Another one, for a class that vLLM's cache does not know, would import all of vLLM again."""
    lazy = registry._LazyRegisteredModel
    monkeypatch.setattr(lazy, "_load_modelinfo_from_cache", lambda *_: None)  # empty
    monkeypatch.setattr(registry, "_run_in_subprocess", None)
    (name,) = built.model.config.architectures or [type(built.model).__name__]
    assert ModelRegistry.models[name].inspect_model_cls().architecture == name


def test_the_cache_is_as_large_as_the_config_says(built):
    """In bytes, and in blocks: those of two layers, keys and values in float32."""
    cache = built.engine.llm.vllm_config.cache_config
    num_bytes = built.engine.config.rollout.cpu_kv_cache_gib * 2**30
    assert num_bytes == 2**30 == cache.kv_cache_memory_bytes
    hf_config = built.model.config
    width = hf_config.num_key_value_heads * geometry_of(hf_config).head_dim
    token_bytes = 2 * hf_config.num_hidden_layers * width * 4
    assert cache.num_gpu_blocks == num_bytes // (token_bytes * cache.block_size)


def test_log_probs_are_those_of_the_distribution_sampled_from(fresh):
    prompts = make_prompts(4)
    for temperature in (1.0, 0.6):
        groups = generate(fresh.engine, prompts, temperature=temperature)
        assert largest_difference(fresh.model, prompts, groups, temperature) < TOLERANCE


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


def test_what_is_interrupted_goes_on_from_its_tokens_at_other_weights(fresh):
    engine, prompts = fresh.engine, make_prompts(16)
    everything = tokens_of(generate(engine, prompts, **LONG))
    first = generate(engine, prompts, num_groups=5, **LONG)
    opened = [i for i, group in enumerate(first) if not all(r.finished for r in group)]
    assert 0 < len(opened) <= 11
    for group, whole in zip(first, everything, strict=True):
        for r, tokens in zip(group, whole, strict=True):
            assert r.token_ids.tolist() == tokens[: len(r.token_ids)]
            assert r.finished == (len(r.token_ids) == len(tokens))
            assert len(r.log_probs) == len(r.token_ids) and r.carried_log_probs is None
            assert not r.truncated or r.finished
    rollouts = [r for i in opened for r in first[i]]
    assert {r.finished for r in rollouts} == {True, False}
    assert not engine.llm.has_unfinished_requests()
    prompts = [prompts[i] for i in opened]
    before = [first[i] for i in opened]
    assert largest_difference(fresh.model, prompts, before) < TOLERANCE

    perturb(fresh.model, seed=4)
    update_weights(engine, weights(fresh.model).items(), policy_version=1)
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


def test_responses_to_a_prompt_compute_it_once(fresh, monkeypatch):
    """All but its last block, which is not full; also where all of them begin in the same step."""
    prompts = make_prompts(3, length=75)
    step, cached = fresh.engine.llm.step, dict[str, list[int]]()

    def watched():
        outputs = step()
        for one in outputs:
            if one.finished:
                cached.setdefault(one.request_id.split("/")[0], []).append(one.num_cached_tokens)
        return outputs

    monkeypatch.setattr(fresh.engine.llm, "step", watched)
    groups = generate(fresh.engine, prompts, num_samples=4)
    assert {name: sorted(found) for name, found in cached.items()} == {
        prompt.id: [0, 64, 64, 64] for prompt in prompts
    }
    assert largest_difference(fresh.model, prompts, groups) < TOLERANCE


def test_goes_on_from_what_an_environment_says(fresh, monkeypatch):
    """Log-probs are those of sampled tokens, given all tokens before.

    By what vLLM says of each request, those before are cached, and none of an earlier generation;
    the prompts alone fill four blocks of 32 tokens.
    """
    prompts = make_prompts(20, length=130)
    settings = {"num_samples": 1, "max_response_tokens": 30}
    alone = generate(fresh.engine, prompts, **settings)
    step, ended = fresh.engine.llm.step, list[tuple[str, int]]()
    is_idle, environment = threading.Event(), TwoTurn((20, 21, 22))

    def watched():
        outputs = step()
        ended.extend((o.request_id, o.num_cached_tokens) for o in outputs if o.finished)
        return outputs

    def respond(episode):
        assert is_idle.wait(HANG_S)  # until the engine has nothing left to decode
        return environment.respond(episode)

    monkeypatch.setattr(fresh.engine.llm, "step", watched)
    calls = calls_of(respond, run=in_thread, eos_token_ids=fresh.ends, call_timeout_s=1000)
    replies = calls.replies
    calls.replies = lambda *, wait_s: (wait_s and is_idle.set(), replies(wait_s=wait_s))[1]
    groups = generate(fresh.engine, prompts, calls=calls, **settings)
    cached = dict(reversed(ended))
    assert len(cached) == len(prompts) and {*cached.values()} == {0}
    for one in cached.items():
        ended.remove(one)
    assert len(ended) > 3 and min(count for _, count in ended) >= 128
    for prompt, (first,), (one,) in zip(prompts, alone, groups, strict=True):
        n = len(first.token_ids)
        assert one.token_ids[:n].tolist() == first.token_ids.tolist()
        if one.response_mask is None:
            assert one.truncated
            continue
        assert np.flatnonzero(~one.response_mask).tolist() == [n, n + 1, n + 2]
        assert one.token_ids[n : n + 3].tolist() == [20, 21, 22]
        assert one.truncated == (int(one.token_ids[-1]) not in fresh.ends)
        expected = expected_log_probs(fresh.model, prompt.token_ids, one.token_ids)
        difference = np.abs(expected - one.log_probs)[one.response_mask]
        assert difference.max() < TOLERANCE
        (scored,) = fresh.engine.score(to_rollouts([[one]]))
        assert np.abs(scored - one.log_probs[one.response_mask]).max() < TOLERANCE


def test_stops_at_the_tokens_that_a_request_names(fresh):
    """The tokens before are those without it; the stop token stays, with its log-prob."""
    prompts = make_prompts(4)
    alone = [one for group in generate(fresh.engine, prompts, **LONG) for one in group]
    found = Counter(np.concatenate([one.token_ids for one in alone]).tolist())
    stop = tuple(token for token, _ in found.most_common(6) if token not in fresh.ends)
    calls = calls_of(lambda _: None, eos_token_ids=fresh.ends)
    calls.turns, calls.timing = (
        SimpleNamespace(stop_ids=(*stop, *fresh.ends), is_over=lambda _: True),
        None,
    )
    groups = generate(fresh.engine, prompts, calls=calls, **LONG)
    num_stopped = 0
    for one, whole in zip((one for group in groups for one in group), alone, strict=True):
        ends = np.flatnonzero(np.isin(whole.token_ids, stop))
        count = int(ends[0]) + 1 if len(ends) else len(whole.token_ids)
        assert one.token_ids.tolist() == whole.token_ids[:count].tolist()
        assert np.abs(one.log_probs - whole.log_probs[:count]).max() < TOLERANCE
        num_stopped += len(ends) > 0
    assert num_stopped > 4


def test_requests_beyond_the_places_wait(fresh, monkeypatch):
    scheduler = fresh.engine.llm.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_num_active_reqs", 10)
    (one, *others) = make_prompts(16)
    request = Request("", one.token_ids, np.empty(0, np.int32), 9, 7, 1.0, 1.0, stop_ids=(EOS,))
    for prompt in (one, *others):
        fresh.engine.add(replace(request, name=prompt.id, prompt_ids=prompt.token_ids))
    num_ended = len(fresh.engine.poll())
    assert fresh.engine.num_requests() == (10 - num_ended, 6)
    assert len(fresh.engine.abort()) == 16 - num_ended
    assert fresh.engine.num_requests() == (0, 0)


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


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_alternatives_are_the_most_likely_tokens_and_change_no_sample(fresh, top_p):
    check_alternatives(fresh.engine, fresh.model, top_p=top_p, bound=TOLERANCE)


def test_more_tokens_than_one_engine_step_takes(fresh):
    # A seeded prompt cut in two by the step's budget fails on a CPU; whole prompts wait instead.
    scheduler = fresh.engine.llm.vllm_config.scheduler_config
    assert not scheduler.enable_chunked_prefill
    count = scheduler.max_num_batched_tokens // 100 + 1  # ends inside a prompt
    prompts = make_prompts(count, length=100)
    groups = generate(fresh.engine, prompts, num_samples=1, max_response_tokens=2)
    assert len(groups) == count


def test_the_trainer_keeps_its_generators_and_its_threads(built):
    assert built.kept_random_state and built.kept_threads
    assert built.starts_equal  # from the folder that this package wrote
    states = random_states()
    generate(built.engine, make_prompts(2))
    built.engine.score(Rollouts.of(*sequences(built.engine)))
    assert random_states() == states


# --- weights -----------------------------------------------------------------------------------


def test_scored_log_probs_equal_those_of_transformers(fresh):
    prompt_ids, response_ids = sequences(fresh.engine)
    # The longest sequence there may be, scored from its second token on.
    prompt_ids.append(np.array([5], dtype=np.int32))
    response_ids.append(np.arange(163, dtype=np.int32) % VOCAB)
    scored = fresh.engine.score(Rollouts.of(prompt_ids, response_ids))
    for prompt, response, values in zip(prompt_ids, response_ids, scored, strict=True):
        assert values.dtype == np.float32
        assert np.abs(expected_log_probs(fresh.model, prompt, response) - values).max() < TOLERANCE


def test_synced_weights_are_the_ones_generated_with(fresh):
    # Longer than a block of the KV cache (32 on a CPU): what is cached of the old weights must go.
    prompts = make_prompts(3, length=140)
    for version in (1, 2, 3):
        perturb(fresh.model, seed=version)
        stale = largest_difference(fresh.model, prompts, generate(fresh.engine, prompts))
        assert stale > 0.05
        update_weights(fresh.engine, weights(fresh.model).items(), policy_version=version)
        assert fresh.engine.policy_version == version
        groups = generate(fresh.engine, prompts)
        assert largest_difference(fresh.model, prompts, groups) < TOLERANCE


def test_a_corrupted_weight_is_found(fresh):
    prompt_ids, response_ids = sequences(fresh.engine)
    expected = trainer_log_probs(fresh.model, prompt_ids, response_ids)
    corrupted = weights(fresh.model)
    corrupted["model.layers.1.self_attn.k_proj.weight"][3] += 0.5
    update_weights(fresh.engine, corrupted.items(), policy_version=5)
    actual = fresh.engine.score(Rollouts.of(prompt_ids, response_ids))
    with pytest.raises(WeightSyncError, match=r"\bversion 5\b") as caught:
        verify_weights(fresh.engine, Rollouts.of(prompt_ids, response_ids), expected)
    diffs = [np.abs(a - b) for a, b in zip(actual, expected, strict=True)]
    sequence = int(np.argmax([diff.mean() for diff in diffs]))
    token = int(diffs[sequence].argmax())
    trainer, engine = (values[sequence][token] for values in (expected, actual))
    places = (f"sequence {sequence} ", f"token {token}:")
    values = (f"trainer {trainer:.6f}", f"engine {engine:.6f}")
    assert re.search(mentions(*places, *values), str(caught.value))


def test_a_layer_for_which_nothing_came_is_found(fresh, monkeypatch):
    """As an output layer of vLLM's own, of a model whose layer is tied."""
    monkeypatch.setattr(weights_module, "checked", lambda rules, tensors: tensors)
    tensors = weights(fresh.model)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(WeightSyncError, match=mentions("model.layers.1.mlp")):
        update_weights(fresh.engine, tensors.items(), policy_version=5)


def test_a_value_that_is_not_finite_never_passes(fresh):
    prompt_ids, response_ids = sequences(fresh.engine)
    expected = [np.full(len(response), np.nan, np.float32) for response in response_ids]
    with pytest.raises(WeightSyncError, match=r"\binf\b.*\btrainer nan\b"):
        verify_weights(fresh.engine, Rollouts.of(prompt_ids, response_ids), expected)


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
        update_weights(fresh.engine, tensors.items(), policy_version=4)
    assert fresh.engine.policy_version == -1
    update_weights(fresh.engine, weights(fresh.model).items(), policy_version=5)
    prompts = make_prompts(2)
    assert largest_difference(fresh.model, prompts, generate(fresh.engine, prompts)) < TOLERANCE


# --- turns -------------------------------------------------------------------------------------


def test_a_sleeping_engine_wakes_by_a_sync(fresh):
    prompts = make_prompts(2)
    before = tokens_of(generate(fresh.engine, prompts))
    fresh.engine.sleep()
    with pytest.raises(RolloutError, match=mentions("generate", "sleeping")):
        generate(fresh.engine, prompts)
    with pytest.raises(RolloutError, match=mentions("score", "sleeping")):
        fresh.engine.score(Rollouts.of([np.array([2])], [np.array([3])]))
    update_weights(fresh.engine, weights(fresh.model).items(), policy_version=1)
    assert tokens_of(generate(fresh.engine, prompts)) == before


def test_what_was_received_may_go_before_the_cache_comes(fresh):
    seen = []

    def tensors():
        yield from weights(fresh.model).items()
        seen.append("all are sent")

    fresh.engine.sleep()
    phase = fresh.engine.schedule
    update_weights(
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
