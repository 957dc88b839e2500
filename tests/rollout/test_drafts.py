"""Draft tokens in a real vLLM engine: what they may not change, and how often they are accepted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.utils.rnn import pad_sequence
from vllm.model_executor.warmup.jit_warmup_triton_helper import VllmTritonJitKernel
from vllm.triton_utils import dispatcher

from gapo_megatron.compat import vllm, vllm_cpu
from gapo_megatron.models.tables import ARCHITECTURES
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.requests import request_seed
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.types import Episode
from tests.alternatives import check_alternatives
from tests.draft_setup import write_draft
from tests.rollout_setup import (
    TOLERANCE,
    VOCAB,
    build_engine,
    generate,
    largest_difference,
    make_config,
    make_model,
    make_prompts,
    perturb,
    process_group,
    tokens_of,
    trainer_log_probs,
    update_weights,
    weights,
)

# The sharper model's logits are four times as large, and so is their rounding.
SHARPER = 4
BOUND = SHARPER * TOLERANCE
DRAFTS = {
    "ngram": {"draft": "ngram", "draft_ngram": 1, "draft_tokens": 3},
    "eagle3": {"draft": "eagle3", "draft_tokens": 2},
}


def sharper_model() -> torch.nn.Module:
    """Few likely tokens: n-grams recur, and many proposals are accepted."""
    model = make_model(False)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPER)
    return model.eval()


@pytest.fixture(scope="module", params=["ngram", pytest.param("eagle3", marks=pytest.mark.system)])
def built(request, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """An engine with drafts that has its weights from a sync, and its transformers model."""
    model, folder = sharper_model(), tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    rollout = DRAFTS[request.param]
    if request.param == "eagle3":
        rollout = rollout | {"draft_hf_dir": str(write_draft(folder / "draft"))}
    with process_group():
        engine = build_engine(make_config(folder, **rollout), load_weights=False)
        update_weights(engine, weights(model).items(), policy_version=0)
        yield SimpleNamespace(
            engine=engine, model=model, initial=weights(model), kind=request.param
        )
        engine.close()


@pytest.fixture
def fresh(built) -> SimpleNamespace:
    """The same, with the initial weights on both sides."""
    built.model.load_state_dict(built.initial)
    if built.engine.policy_version != 0:
        update_weights(built.engine, built.initial.items(), policy_version=0)
    return built


def counts_of(groups) -> tuple[int, int]:
    """Numbers of proposed and of accepted tokens."""
    episodes = [one for group in groups for one in group]
    return sum(one.num_drafted for one in episodes), sum(one.num_accepted for one in episodes)


# --- the same distribution ------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8)])
def test_log_probs_are_those_of_the_distribution_sampled_from(fresh, temperature, top_p):
    """vLLM as it is reads the temperature of proposed tokens from memory that nothing was written
    to: log-probs are then off by whole units, or NaN."""
    prompts = make_prompts(4)
    groups = generate(
        fresh.engine, prompts, temperature=temperature, top_p=top_p, num_samples=8, seed=5
    )
    assert counts_of(groups)[1] > 0
    for prompt, group in zip(prompts, groups, strict=True):
        for one in group:
            expected = nucleus_log_probs(fresh.model, prompt, one, temperature, top_p)
            assert np.abs(expected - one.log_probs).max() < BOUND


def nucleus_log_probs(model, prompt, episode: Episode, temperature: float, top_p: float):
    """Log-probs renormalised over the smallest set of tokens with probability `top_p`."""
    tokens = torch.tensor([*prompt.token_ids, *episode.token_ids]).long()
    with torch.no_grad():
        probs = (model(tokens[None]).logits[0] / temperature).softmax(-1)
    found = []
    for row, token in enumerate(episode.token_ids, start=len(prompt.token_ids) - 1):
        ordered, order = probs[row].sort(descending=True)
        kept = order[: int((ordered.cumsum(0) < top_p).sum()) + 1] if top_p < 1 else order
        assert token in kept
        found.append(float((probs[row, int(token)] / probs[row, kept].sum()).log()))
    return np.array(found)


FALSE_ALARM, NUM_BINS = 1e-4, 16


def test_tokens_follow_the_model(fresh):
    """512 responses against the exact probabilities of each token given those before it.

    Fails a right engine with probability 1e-4, but seeds are fixed. A wrong one cannot hide, with
    99 %, shares of 16 equally likely bins, from the likely tokens to the others, that differ by 8 %
    of their size (rms).
    """
    tokens, probs = [], []
    prompts = make_prompts(8)
    groups = generate(fresh.engine, prompts, num_samples=64, seed=2)
    for prompt, group in zip(prompts, groups, strict=True):
        ids = [torch.tensor([*prompt.token_ids, *one.token_ids.tolist()]) for one in group]
        with torch.no_grad():  # causal: what follows a response does not matter
            logits = fresh.model(pad_sequence(ids, batch_first=True)).logits.double()
        for one, rows in zip(group, logits[:, len(prompt.token_ids) - 1 :], strict=True):
            tokens.append(one.token_ids)
            probs.append(rows[: len(one.token_ids)].softmax(-1).numpy())
    assert_drawn(np.concatenate(tokens), np.concatenate(probs))


def assert_drawn(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square of the places of tokens [n] in their distributions [n, VOCAB], likely ones first.

    A place, at random within the token's own share, is uniform between 0 and 1, and independent of
    those before it.
    """
    own = probs[np.arange(len(tokens)), tokens, None]
    places = np.where(probs > own, probs, 0).sum(1)
    places += np.random.default_rng(0).random(len(tokens)) * own[:, 0]
    counts, _ = np.histogram(places, NUM_BINS, (0, 1))
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_placeholders_for_proposals_are_rejected(fresh):
    """Requests of which all but one token are cached get -1 in place of proposals.

    vLLM's kernel for a CPU takes the probability of -1 from another position, that of its last
    token, and may accept it. A likely last token shows that: the next token then has the log-prob
    of another context. EAGLE-3 computes a whole block more, and has none.
    """
    length = fresh.engine.llm.vllm_config.cache_config.block_size + 1
    (prompt,) = prompts = make_prompts(1, length=length)
    make_last_token_likely(fresh.model, prompt.token_ids)
    update_weights(fresh.engine, weights(fresh.model).items(), policy_version=1)
    groups = generate(fresh.engine, prompts, num_samples=128, max_response_tokens=1)
    if fresh.kind == "ngram":  # the first of the group computes the prompt for the others
        most = fresh.engine.config.rollout.draft_tokens
        assert sorted(one.num_drafted for one in groups[0]) == [0] + 127 * [most]
    assert largest_difference(fresh.model, prompts, groups) < BOUND
    with torch.no_grad():
        logits = fresh.model(torch.tensor([prompt.token_ids])).logits[0, -1].double()
    tokens = np.concatenate([one.token_ids for one in groups[0]])
    assert_drawn(tokens, logits.softmax(-1).numpy()[None].repeat(len(tokens), 0))
    groups = generate(fresh.engine, prompts, num_samples=8, max_response_tokens=12)
    assert largest_difference(fresh.model, prompts, groups) < BOUND


def make_last_token_likely(model: torch.nn.Module, prompt: Sequence[int]) -> None:
    """Swap output rows: the last token becomes the likeliest after the prompt and placeholders."""
    with torch.no_grad():
        likely = int(model(torch.tensor([[*prompt, 0, 0]])).logits[0, -1].argmax())
        rows = model.lm_head.weight
        rows[[likely, VOCAB - 1]] = rows[[VOCAB - 1, likely]]
        probs = model(torch.tensor([[*prompt, 0, 0]])).logits[0, -1].softmax(-1)
    assert probs[-1] > 0.1


# --- the engine's promises ------------------------------------------------------------------------


def test_same_seeds_give_the_same_samples_in_any_order_and_company(fresh):
    prompts = make_prompts(6)
    groups = generate(fresh.engine, prompts)
    again = generate(fresh.engine, prompts)
    assert tokens_of(again) == tokens_of(groups)
    assert counts_of(again) == counts_of(groups)
    for one, other in zip(sum(groups, ()), sum(again, ()), strict=True):
        assert one.log_probs.tolist() == other.log_probs.tolist()
    if fresh.kind == "ngram":  # an EAGLE-3 draft's choices may depend on rounding, as by a batch
        assert tokens_of(generate(fresh.engine, prompts[::-1])) == tokens_of(groups)[::-1]
        assert tokens_of(generate(fresh.engine, prompts[2:3])) == tokens_of(groups)[2:3]


def test_alternatives_are_the_most_likely_tokens_and_change_no_sample(fresh):
    check_alternatives(fresh.engine, fresh.model, top_p=0.9, bound=BOUND)


def test_a_sync_is_verified_and_leaves_a_draft_as_it_is(fresh):
    """The engine's scores of its own samples, proposed tokens among them, are its log-probs."""
    before = draft_tensors(fresh.engine)
    assert bool(before) == (fresh.kind == "eagle3")
    perturb(fresh.model, seed=4)
    fresh.engine.sleep()
    fresh.engine.wake()
    update_weights(fresh.engine, weights(fresh.model).items(), policy_version=1)
    after = draft_tensors(fresh.engine)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {*before} - {"model.embed_tokens.weight"}  # the model's own embedding
    groups = generate(fresh.engine, make_prompts(4))
    assert counts_of(groups)[0] > 0
    rollouts = to_rollouts(groups)
    scored = fresh.engine.score(rollouts)
    for i, values in enumerate(scored):
        assert np.abs(values - rollouts.rollout_log_probs[i]).max() < BOUND
    ids = ([*side.values()] for side in (rollouts.prompt_ids, rollouts.response_ids))
    check = verify_weights(fresh.engine, rollouts, trainer_log_probs(fresh.model, *ids))
    assert 0 < check.max_abs_diff < BOUND


def draft_tensors(engine) -> dict[str, torch.Tensor]:
    """Copies of a draft model's tensors, of norms, embedding and output layer; n-grams have none.

    Others are only kept packed on a CPU.
    """

    def copied(worker) -> dict[str, torch.Tensor]:
        model = getattr(worker.model_runner.drafter, "model", None)
        return (
            {}
            if model is None
            else {name: one.clone() for name, one in model.named_parameters() if len(one)}
        )

    (found,) = engine.llm.collective_rpc(copied)
    return found


# --- counting -------------------------------------------------------------------------------------


def test_accepted_tokens_are_those_that_took_no_decoding_step(fresh):
    prompt = make_prompts(1)[0]
    most = fresh.engine.config.rollout.draft_tokens
    for sample in range(20):
        request = Request(
            name="one",
            prompt_ids=prompt.token_ids,
            response_ids=np.empty(0, np.int32),
            max_tokens=60,
            seed=request_seed(0, 0, "p", sample),
            temperature=0.5,
            top_p=1.0,
        )
        fresh.engine.add(request)
        num_steps, ended = 0, []
        while not ended:
            ended, num_steps = fresh.engine.poll(), num_steps + 1
        (one,) = ended
        num_saved = len(one.token_ids) - num_steps
        # What was accepted after the end of the response is dropped.
        assert num_saved <= one.num_accepted <= num_saved + most
        assert one.num_accepted <= one.num_drafted <= most * num_steps
        fresh.engine.abort()


def test_an_engine_starts_after_one_that_proposed_ngrams():
    """It has imported numba, whose library has no usual attributes: vLLM's search stopped there."""
    pytest.importorskip("llvmlite.binding")
    vllm_cpu.search_only_vllm()
    vllm.current_platform.register_triton_kernel_overrides()  # as every worker does


def test_every_kernel_is_replaced_wherever_it_is_held():
    """No module of this process is left with one that only Triton could run."""
    importlib.import_module("vllm.v1.spec_decode.llm_base_proposer")  # holds copies
    vllm_cpu.search_only_vllm()
    vllm.current_platform.register_triton_kernel_overrides()
    replaced = {id(kernel) for kernel, _ in dispatcher._registry.values()}
    assert len(replaced) > 5
    left = [
        f"{module}.{name}"
        for module, one in list(sys.modules.items())
        for name, value in list(getattr(one, "__dict__", {}).items())
        if id(value) in replaced
        or (isinstance(value, VllmTritonJitKernel) and id(value.kernel) in replaced)
    ]
    assert left == []


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_vllms_class_gives_hidden_states_as_the_table_says(architecture) -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    found = ModelRegistry._try_load_model_cls(architecture.hf_class)
    assert supports_eagle3(found) == architecture.gives_hidden_states
