"""A request to vLLM for every response: what it asks for, and the rollout that comes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from gapo_megatron.errors import RolloutError
from gapo_megatron.types import Ended, Prompt, Rollout

Request = tuple[list[int], SamplingParams]
"""Tokens given, and how to go on."""

# Sent with every request: nothing becomes text, and only the last output of a request is made.
TOKENS_ONLY: dict[str, Any] = {
    "detokenize": False,
    "flat_logprobs": True,
    "output_kind": RequestOutputKind.FINAL_ONLY,
    "skip_clone": True,
}

NOT_BEGUN = Rollout(np.empty(0, np.int32), np.empty(0, np.float32), truncated=False, finished=False)
"""A response before its first token."""


def request_seed(run_seed: int, step: int, prompt_id: str, sample: int, start: int = 0) -> int:
    """63-bit seed of one request: a hash of what identifies it in the run.

    `start` tokens are there already: a step that goes on with what itself has begun, in a further
    draw of dynamic sampling, must not meet the same random numbers again.
    """
    identity = [run_seed, step, prompt_id, sample, *([start] if start else [])]
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def make_request(
    prompt: Prompt,
    sample: int,
    so_far: Rollout,
    *,
    seed: int,
    step: int,
    max_response_tokens: int,
    **params: Any,
) -> Request:
    """Ask for the rest of response number `sample`; `params` as in `SamplingParams`."""
    num_tokens = len(so_far.token_ids)
    return [*prompt.token_ids, *so_far.token_ids.tolist()], SamplingParams(
        seed=request_seed(seed, step, prompt.id, sample, num_tokens),
        max_tokens=max_response_tokens - num_tokens,
        logprobs=0,
        **params,
        **TOKENS_ONLY,
    )


class Responses:
    """The k responses to each of some prompts, as far as they have come.

    Attributes:
        rollouts: of each prompt, in order.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        begun: Mapping[str, tuple[Rollout, ...]],
        *,
        num_samples: int,
    ) -> None:
        """`begun` has the responses to some of the prompts, by id; the others have no token yet."""
        not_begun = (NOT_BEGUN,) * num_samples
        self.rollouts = [list(begun.get(prompt.id, not_begun)) for prompt in prompts]
        self._prompts = prompts
        self._num_open = [sum(not one.finished for one in group) for group in self.rollouts]

    @property
    def num_whole(self) -> int:
        """Prompts whose responses are all finished."""
        return self._num_open.count(0)

    @property
    def ended(self) -> list[Ended]:
        """All that are finished."""
        return [
            (prompt, sample, rollout)
            for prompt, group in zip(self._prompts, self.rollouts, strict=True)
            for sample, rollout in enumerate(group)
            if rollout.finished
        ]

    def requests(self, **settings: Any) -> dict[str, Request]:
        """Ask for the rest of all others, by a name each; `settings` as of `make_request`."""
        return {
            f"{i}-{sample}": make_request(prompt, sample, rollout, **settings)
            for i, prompt in enumerate(self._prompts)
            for sample, rollout in enumerate(self.rollouts[i])
            if not rollout.finished
        }

    def take(self, output: RequestOutput, *, may_be_open: bool = False) -> Ended:
        """Add what a request brought; the arguments are those of `to_rollout`."""
        i, sample = map(int, output.request_id.split("-"))
        rollout = to_rollout(output, self.rollouts[i][sample], may_be_open=may_be_open)
        self.rollouts[i][sample] = rollout
        self._num_open[i] -= rollout.finished
        return self._prompts[i], sample, rollout


def to_rollout(output: RequestOutput, so_far: Rollout, *, may_be_open: bool) -> Rollout:
    """The response as far as it has come: `so_far` and what the request brought.

    Raises:
        RolloutError: neither EOS nor the limit ended the request (nor, where it `may_be_open`, that
            it was broken off), or log-probs miss its tokens.
    """
    (completion,) = output.outputs
    flat, tokens = completion.logprobs, list(completion.token_ids)
    reason = completion.finish_reason
    is_open = may_be_open and reason == "abort"
    if not is_open and (reason not in ("stop", "length") or not tokens):
        raise RolloutError(
            f"vLLM ended request {output.request_id} with {reason!r} after {len(tokens)} tokens"
        )
    if flat is None or flat.token_ids != tokens:
        raise RolloutError(f"vLLM's log-probs of request {output.request_id} miss its tokens")
    token_ids = np.asarray(tokens, dtype=np.int32)
    log_probs = np.asarray(flat.logprobs, dtype=np.float32)
    return Rollout(
        token_ids=np.concatenate([so_far.token_ids, token_ids]),
        log_probs=np.concatenate([so_far.log_probs, log_probs]),
        truncated=reason == "length",
        finished=not is_open,
        carried=so_far.carried,
    )


def num_tokens(output: RequestOutput) -> int:
    """Tokens that a request brought."""
    return sum(len(completion.token_ids) for completion in output.outputs)
