"""What an engine returns for requests with alternatives, compared with its model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from transformers import PreTrainedModel

from gapo_megatron.rollout.engine import Completion, Engine, Request


def check_alternatives(
    engine: Engine, model: PreTrainedModel, *, top_p: float, bound: float
) -> None:
    """Requests with alternatives get the model's most likely tokens, and sample as without."""
    temperature, counts = 0.8, [0, 1, 5, 20] * 2
    random = np.random.default_rng(0)
    prompts = random.integers(2, model.config.vocab_size, (len(counts), 9)).tolist()

    def sampled(counts: Iterable[int]) -> dict[str, Completion]:
        for number, (tokens, count) in enumerate(zip(prompts, counts, strict=True)):
            request = Request(
                name=str(number),
                prompt_ids=tokens,
                response_ids=np.empty(0, np.int32),
                max_tokens=8 + 4 * number,
                seed=number,
                temperature=temperature,
                top_p=top_p,
                num_alternatives=count,
            )
            engine.add(request)
        ended = list[Completion]()
        while len(ended) < len(prompts) - 2:
            ended += engine.poll()
        ended += engine.abort()
        return {one.name: one for one in ended}

    plain, asked = sampled([0] * len(counts)), sampled(counts)
    assert "abort" in {one.reason for one in asked.values()}
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        one, other = asked[str(number)], plain[str(number)]
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.reason == other.reason
        assert one.log_probs.tobytes() == other.log_probs.tobytes()
        ids, log_probs = one.alternative_ids, one.alternative_log_probs
        if not count:
            assert ids is None and log_probs is None
            continue
        assert ids is not None and log_probs is not None
        assert ids.shape == log_probs.shape == (len(one.token_ids), count)
        assert (ids.dtype, log_probs.dtype) == (np.int32, np.float32)
        tokens = torch.tensor([[*prompt, *one.token_ids.tolist()]])
        with torch.no_grad():
            rows = model(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
        ordered, order = rows.softmax(-1).sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        expected = torch.zeros_like(ordered).scatter(1, order, ordered)
        expected = (expected / expected.sum(-1, keepdim=True)).log().numpy()
        for row, found in enumerate(log_probs):
            # The values in order, and each with its own token.
            for values in (np.sort(expected[row])[::-1][:count], expected[row][ids[row]]):
                assert (np.isinf(values) == np.isinf(found)).all()
                kept = ~np.isinf(found)
                assert np.abs(values[kept] - found[kept]).max() < bound
            assert (np.diff(found[~np.isinf(found)]) <= 0).all() and len({*ids[row]}) == count
            same = found[ids[row] == one.token_ids[row]]
            assert not len(same) or same[0] == one.log_probs[row]
        assert count < 20 or np.isinf(log_probs).any() == (top_p < 1)
