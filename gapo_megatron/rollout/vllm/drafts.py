"""Draft tokens: the arguments of vLLM."""

from __future__ import annotations

from typing import Any

from gapo_megatron.config import RolloutConfig


def draft_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """Arguments of vLLM for `rollout.draft`; none without drafts.

    Verification is rejection sampling (arXiv 2211.17192): a proposed token is accepted with its
    probability under the model, and the token in place of a rejected one comes from the rest of the
    distribution. So tokens and their log-probs are those of the model; vLLM's other ways to verify
    are not asked for, since one of them (`synthetic`) changes the distribution.
    """
    if rollout.draft == "none":
        return {}
    speculative: dict[str, Any] = {
        "method": rollout.draft,
        "num_speculative_tokens": rollout.draft_tokens,
        "rejection_sample_method": "standard",
    }
    arguments: dict[str, Any] = {"per_request_spec_decode_metrics": "summary"}
    if rollout.draft == "ngram":
        length = rollout.draft_ngram
        speculative |= {"prompt_lookup_min": length, "prompt_lookup_max": length}
    else:
        speculative |= {
            "model": rollout.draft_hf_dir,
            "draft_sample_method": "greedy",
            # Unlike the model's, its weights are read here, and only from safetensors.
            "draft_load_config": {"load_format": "safetensors"},
        }
        # No sync brings them back after a sleep that drops the model's weights.
        arguments["sleep_preserve_parameter_names"] = ["draft.*"]
    return arguments | {"speculative_config": speculative}
