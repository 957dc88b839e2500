"""Rules between settings of different sections, and checks of the paths that a run reads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gapo_megatron.config.data_section import REASONING_GYM
from gapo_megatron.config.environment import SERVED
from gapo_megatron.config.reward_section import OF_ENVIRONMENT
from gapo_megatron.config.section import INPUT_PATH
from gapo_megatron.errors import ConfigError
from gapo_megatron.user_code import is_code

if TYPE_CHECKING:
    from gapo_megatron.config import Config


def check_together(config: Config) -> None:
    """Refuse settings that are each valid but cannot be combined.

    Raises:
        ValueError: names both settings, their values and the rule.
    """
    if config.run.hang_timeout_s >= config.parallel.timeout_s:
        raise ValueError(
            f"run.hang_timeout_s ({config.run.hang_timeout_s}) must be below "
            f"parallel.timeout_s ({config.parallel.timeout_s})"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.batch.max_tokens_per_microbatch < longest:
        raise ValueError(
            f"batch.max_tokens_per_microbatch ({config.batch.max_tokens_per_microbatch}) must "
            "hold one sequence: data.max_prompt_tokens + rollout.max_response_tokens = "
            f"{longest}"
        )
    if config.supervised and config.model.megatron_dir:
        raise ValueError(
            f"model.megatron_dir ({config.model.megatron_dir}) must be empty with [supervised]: it "
            "would replace the weights that supervised training writes to model.hf_dir"
        )
    if config.objective.importance_weights != "none" and config.rollout.top_p < 1:
        raise ValueError(
            f"rollout.top_p ({config.rollout.top_p}) must be 1 with "
            f"objective.importance_weights ({config.objective.importance_weights!r}): log-probs of "
            "a truncated distribution do not measure the engine's error"
        )
    for steps, shares in config.data.stages(config.run.num_steps) if config.data.source else ():
        if not shares:
            raise ValueError(
                f"data.source: steps {steps[0]} to {steps[-1]} have no source; first_step and "
                "last_step must leave one for every step of run.num_steps "
                f"({config.run.num_steps})"
            )
    _check_numbers(config)
    _check_generated(config)
    if config.environment.structured_outputs:
        _check_grammars(config)
    served, by_itself = config.environment.kind in SERVED, config.reward.kind == OF_ENVIRONMENT
    if (served and not by_itself) or (by_itself and not config.environment.is_called):
        raise ValueError(
            f"reward.kind ({config.reward.kind!r}) and environment.kind "
            f"({config.environment.kind!r}): {' and '.join(SERVED)} give the verdict themselves, "
            "which reward.kind 'environment' takes; 'one_turn' gives none"
        )
    if served and config.batch.partial_rollouts:
        raise ValueError(
            "batch.partial_rollouts (True) must be False with environment.kind "
            f"({config.environment.kind!r}): a server's session ends with the step"
        )
    _check_sides(config)
    if config.rollout.quantization and config.model.precision == "fp32":
        raise ValueError(
            f"rollout.quantization ({config.rollout.quantization!r}) needs model.precision "
            "'bf16', 'fp16' or 'fp8', not 'fp32': vLLM quantises 16-bit layers only"
        )
    if config.evaluation.every_steps and not config.data.has_held_out:
        raise ValueError(
            f"evaluation.every_steps ({config.evaluation.every_steps}) needs data.eval_path, or "
            "eval_size of a generated data.source"
        )


def _check_grammars(config: Config) -> None:
    """Rules for turns that a grammar masks: the engine's log-probs are not the policy's."""
    objective, rollout = config.objective, config.rollout
    excluded = {
        "objective.old_log_probs": (objective.old_log_probs, "trainer"),
        "objective.importance_weights": (objective.importance_weights, "none"),
        "rollout.draft": (rollout.draft, "none"),
        "batch.partial_rollouts": (config.batch.partial_rollouts, False),
    }
    reasons = {
        "rollout.draft": "a draft proposes what the grammar forbids",
        "batch.partial_rollouts": "a turn cannot be resumed within a grammar",
    }
    for name, (value, only) in excluded.items():
        if value != only:
            why = reasons.get(name, "log-probs under a grammar are not the policy's")
            raise ValueError(
                f"{name} ({value!r}) must be {only!r} with environment.structured_outputs (true): "
                f"{why}"
            )
    if is_code(rollout.engine):
        raise ValueError(
            f"environment.structured_outputs (true) needs vLLM, not rollout.engine "
            f"({rollout.engine!r})"
        )


def _check_numbers(config: Config) -> None:
    """Rules for a verifier's numbers, and for advantages from them: c is a count of verdicts."""
    reward = config.reward
    is_threshold_set = reward.correct_above != type(reward).model_fields["correct_above"].default
    if is_threshold_set and not reward.gives_numbers:
        raise ValueError(
            f"reward.correct_above ({reward.correct_above}) needs a verifier that returns numbers, "
            f"'reasoning_gym', 'environment' or your own, not reward.kind {reward.kind!r}"
        )
    if not reward.graded:
        return
    method = config.objective.resolve()
    if method.adaptive or method.focal_gamma:
        key = "adaptive (true)" if method.adaptive else f"focal_gamma ({method.focal_gamma:g})"
        raise ValueError(
            f"reward.graded (true) does not go with objective.method {config.objective.method!r}: "
            f"its {key} depends on c, the number of correct responses"
        )
    if not reward.gives_numbers:
        raise ValueError(
            f"reward.graded (true) needs a verifier that returns numbers, 'reasoning_gym', "
            f"'environment' or your own, not reward.kind {config.reward.kind!r}"
        )


def _check_generated(config: Config) -> None:
    """Components judge every response, so one of them must know generated problems."""
    reward, generated = config.reward, config.data.generated
    if not generated or not reward.components:
        return
    if not reward.has_component(REASONING_GYM) and REASONING_GYM not in reward.verifiers:
        raise ValueError(
            f"reward.components ({', '.join(reward.components)}) must have one of kind "
            f"{REASONING_GYM!r} with data.source {generated[0].name!r}, whose kind is "
            f"{REASONING_GYM!r}: no other verifier can judge its problems"
        )


def _check_sides(config: Config) -> None:
    """Rules for runs in which some ranks only generate, and for batches sampled ahead."""
    rollout, objective = config.rollout, config.objective
    if rollout.generation_nodes and rollout.generation_ranks:
        raise ValueError(
            f"rollout.generation_ranks ({rollout.generation_ranks}) must be 0 with "
            f"rollout.generation_nodes ({rollout.generation_nodes}): set only one of the two"
        )
    if rollout.has_generation_side:
        key = "generation_nodes" if rollout.generation_nodes else "generation_ranks"
        side = f"rollout.{key} ({getattr(rollout, key)})"
        if config.optimizer.offload != "none":
            raise ValueError(
                f"optimizer.offload ({config.optimizer.offload!r}) must be 'none' with {side}: the "
                "training GPUs hold no engine that could use the memory"
            )
    if objective.old_log_probs == "rollout":
        _check_around_engine(config)
    if (most := rollout.max_staleness) == 0:
        return
    if not rollout.has_generation_side:
        raise ValueError(
            f"rollout.max_staleness ({most}) needs rollout.generation_nodes (or generation_ranks): "
            "only ranks that do not train can generate during training"
        )
    periods = {
        "evaluation.every_steps": [config.evaluation.every_steps],
        "checkpoint.every_steps": [config.checkpoint.every_steps],
        "checkpoint.keep_steps": config.checkpoint.keep_steps,
    }
    for name, steps in periods.items():
        for step in steps:
            if step % most:
                raise ValueError(
                    f"{name} ({step}) must be a multiple of rollout.max_staleness ({most}): "
                    f"weights are sent every {most} steps"
                )


def _check_around_engine(config: Config) -> None:
    """Rules for ratios against the engine's log-probs."""
    rollout, weights = config.rollout, config.objective.importance_weights
    if rollout.top_p < 1:
        raise ValueError(
            f"rollout.top_p ({rollout.top_p}) must be 1 with objective.old_log_probs 'rollout': "
            "log-probs of a truncated distribution are not the policy's"
        )
    if weights != "none":
        raise ValueError(
            f"objective.importance_weights ({weights!r}) needs objective.old_log_probs 'trainer': "
            "with 'rollout' the ratio is already against the policy that sampled, and every "
            "weight is 1"
        )
    if config.batch.partial_rollouts:
        raise ValueError(
            "batch.partial_rollouts (true) needs objective.old_log_probs 'trainer', not 'rollout': "
            "tokens sampled in earlier steps keep the trainer's log-probs"
        )
    if not is_code(config.rollout.engine) and (reason := why_merged(config)):
        raise ValueError(merged_refusal(config, reason))


def merged_refusal(config: Config, reason: str) -> str:
    """The rule against ratios to an engine with merged weights, and why its weights are merged."""
    return (
        f"objective.old_log_probs ('rollout') must be 'trainer' with adapter.kind "
        f"({config.adapter.kind!r}) and {reason}: the engine then generates with rounded sums of "
        "weights and adapter, and every ratio would have their rounding"
    )


def why_merged(
    config: Config, *, has_experts: bool = False, has_latent: bool = False, device: str = ""
) -> str:
    """Why vLLM cannot compute with an adapter's factors, and gets merged weights; empty if it can.

    So does another engine without `update_adapter`: known when a run starts (`run.engines`).

    Args:
        config: the run's settings.
        has_experts: whether the model has experts, with factors or without.
        has_latent: whether its attention is latent.
        device: type of the engine's device; empty: only reasons that hold on every one.
    """
    if config.adapter.kind == "none":
        return ""
    if "experts" in config.adapter.targets:
        # It has none for experts on a CPU, and those on a GPU are not supported here.
        return f"'experts' in adapter.targets ({[*config.adapter.targets]!r})"
    if config.rollout.quantization:
        return f"rollout.quantization ({config.rollout.quantization!r})"
    if has_latent:  # a reload does not find its weights with room for factors
        return "latent attention"
    if has_experts and device == "cpu":  # with factors beside them vLLM computes them in Triton
        return "experts on a CPU"
    if config.model.precision == "fp32" and device == "cuda":  # its kernels compute in 16 bits
        return "model.precision ('fp32') on a GPU"
    return ""


def inert_clip_note(config: Config) -> str:
    """Say that no ratio of the run can differ from 1, so that no clip acts; empty where one can.

    The first mini-batch of a step takes its old log-probs from its own forward pass.
    """
    batch, objective = config.batch, config.objective
    # Other ranks that generate leave no old log-probs of earlier steps.
    has_carried = batch.partial_rollouts and not config.rollout.has_generation_side
    if batch.num_minibatches > 1 or has_carried or objective.old_log_probs == "rollout":
        return ""
    return (
        f"The clip of objective.method ({objective.method!r}) never acts: batch.minibatch_prompts "
        f"({batch.minibatch_prompts}) equals batch.rollout_prompts, and with one update per step "
        "every ratio is exactly 1. The paper's mini-batches are a quarter of a batch."
    )


def input_paths(config: Config) -> dict[str, str]:
    """Paths of files and folders that commands read, by setting; empty where not given."""
    paths = {
        f"{section}.{name}": getattr(values, name)
        for section, values in config
        if values is not None
        for name, field in type(values).model_fields.items()
        if INPUT_PATH in field.metadata
    }
    return paths | {f"data.source.{one.name}.path": one.path for one in config.data.source}


def missing_inputs(config: Config) -> list[str]:
    """List the missing inputs of a run: a line for each, with setting, path and what is there."""
    unused = () if config.evaluation.every_steps else ("data.eval_path",)
    return [
        f"{name} ({path}) {why}"
        for name, path in input_paths(config).items()
        if path
        and (why := why_missing(name, path))
        and name not in unused
        and not name.startswith("supervised.")  # read by `gapo_megatron.sft` only
    ]


def why_missing(name: str, path: str) -> str:
    """Why the input of the setting `name` is not there, for a message; empty if it is."""
    if not os.path.exists(path):
        return "does not exist"
    is_file = name.startswith("data.")  # all others are folders
    if os.path.isdir(path) == is_file:
        return "is a folder, but must be a file" if is_file else "is a file, but must be a folder"
    return ""


def check_paths(config: Config) -> None:
    """Refuse paths that cannot be resolved on this machine; a path may not exist yet.

    Raises:
        ConfigError: names field, path and reason: a loop of links, a folder without permission, a
            name that is too long for the file system.
    """
    paths = {"run.output_dir": config.run.output_dir, **input_paths(config)}
    for name, path in paths.items():
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigError(f"{name} ({path!r}) cannot be resolved: {error.strerror}") from None
