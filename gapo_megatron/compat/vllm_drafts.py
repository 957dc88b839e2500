"""Undocumented parts of vLLM in use: draft tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from vllm.outputs import CompletionOutput
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

_accept_or_reject = cpu_triton_utils._rejection_random_sample_kernel_impl


def repair_drafts_on_cpu() -> None:
    """Make engines that are built from now on verify drafts on a CPU as they do on a GPU.

    Two of the CPU's kernels are wrong:

    - One writes temperatures and nuclei, repeated for each proposed token, to a copy that is
      dropped: vLLM then divides logits by what happens to be in memory. Log-probs are off by whole
      units or NaN, and no seed repeats a sample.
    - One takes -1 for an index. The scheduler pads a waiting request with -1 in place of proposals
      if only one of its tokens is not computed yet, as with a prompt whose others are cached. The
      kernel may accept it, and samples the next token after ones that are not there.
    """
    # Uses: v1.sample.rejection_sampler.expand_batch_to_tokens, replaced;
    #     utils.cpu_triton_utils._rejection_random_sample_kernel_impl, replaced, its arguments; that
    #     a worker registers it as it starts (platforms.cpu.register_triton_kernel_overrides)
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#55005 (open), #42638 (closed); #46533 (merged): the second, on
    #     GPUs alone
    rejection_sampler.expand_batch_to_tokens = _repeat_for_tokens
    cpu_triton_utils._rejection_random_sample_kernel_impl = _reject_placeholders


def _repeat_for_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """[num_tokens] values x [n] of the requests that the tokens belong to, one value replaced.

    `cu_num_tokens` [n] are numbers of tokens up to and including each request.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    repeated = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
    return repeated.masked_fill(repeated == replace_from, replace_to)


def _reject_placeholders(*args: Any) -> None:
    """The kernel with -1 rejected: what replaces it was sampled from the whole distribution."""
    call = inspect.signature(_accept_or_reject).bind(*args)
    proposed, threshold = (call.arguments[name] for name in ("draft_token_ids", "uniform_probs"))
    call.arguments["draft_token_ids"] = proposed.clamp(min=0)
    call.arguments["uniform_probs"] = threshold.masked_fill(proposed < 0, torch.inf)
    _accept_or_reject(*call.args)


def draft_counts(completion: CompletionOutput) -> tuple[int, int]:
    """Numbers of proposed and of accepted tokens of a request that has ended; 0 without drafts."""
    # Uses: outputs.CompletionOutput.spec_decode_metrics; its num_draft_tokens, histogram
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#48915 (merged): the same in responses of its server
    found = completion.spec_decode_metrics
    if found is None:
        return 0, 0
    num_accepted = sum(number * count for number, count in enumerate(found.histogram))
    return found.num_draft_tokens, num_accepted
