"""Checks of a run that need no torch: they fail at once, before seconds of imports."""

from __future__ import annotations

import logging
from pathlib import Path

from gapo_megatron import rewards
from gapo_megatron.compat.megatron_version import check_version
from gapo_megatron.config import Config
from gapo_megatron.config.rules import check_paths, inert_clip_note, input_paths
from gapo_megatron.config.schema import VLLM
from gapo_megatron.data.reasoning_gym import generate
from gapo_megatron.formats.draft_folder import check_draft
from gapo_megatron.formats.folder import check_replaceable, is_marked
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.io.run_folder import check_writable, read_owner
from gapo_megatron.models.checks import check_replay, check_shapes
from gapo_megatron.models.cpu_engine import check_engine_here, check_routes_here
from gapo_megatron.models.lora import check_adapter
from gapo_megatron.rollout import environments
from gapo_megatron.run.metrics import check_sinks
from gapo_megatron.run.processes import is_first, require_launcher
from gapo_megatron.run.restart import adopt_export, check_not_lost

logger = logging.getLogger(__name__)


def check_before_imports(config: Config) -> None:
    """Refuse a run whose errors show without torch; `Run.start` checks the rest.

    Rank 0 warns of a clip that cannot act.

    Raises:
        ConfigError: names the setting or file that is missing, unusable or does not fit the model,
            or a Megatron-core that is too old.
    """
    check_version()
    check_paths(config)
    check_writable(config.run.output_dir, is_first=is_first())
    check_sinks(config.metrics)
    rewards.check(config.reward)
    generate(config.data.generated, most=0)
    environments.check(config.environment, system_prompt=config.data.system_prompt)
    if is_first():
        require_launcher(read_owner(config.run.output_dir))
        _check_export(config)
        check_not_lost(config)
    model = config.model
    facts = check_model_folder(model.hf_dir, weights=not model.megatron_dir, field="model.hf_dir")
    check_shapes(facts, config.parallel, model)
    check_replay(facts, config.objective)
    check_adapter(facts, config.adapter, config.parallel)
    if config.rollout.engine == VLLM:
        check_engine_here(facts, field="model.hf_dir", folder=model.hf_dir)
        check_routes_here(config.objective)
        check_draft(config.rollout, facts)
    if is_first() and (note := inert_clip_note(config)):
        logger.warning(note)


def _check_export(config: Config) -> None:
    """Refuse a run whose exported model would replace anything but its own earlier export."""
    run_dir = Path(config.run.output_dir)
    export = run_dir / "hf"
    adopt_export(run_dir)
    is_ours = is_marked(export, made_by="train")
    check_replaceable(
        export, field="run.output_dir/hf", inputs=input_paths(config), is_ours=is_ours
    )
