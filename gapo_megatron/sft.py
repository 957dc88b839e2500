"""Supervised training with the same policy: `python -m gapo_megatron.sft CONFIG.toml [overrides]`.

Creates the folder `model.hf_dir` from which GAPO starts (the demo's warm start): the model of
`supervised.initial_hf_dir`, trained on prompt/response lines with the negative log-likelihood of
the response tokens.
"""

from __future__ import annotations

import argparse
import warnings

from gapo_megatron.config import Config, load_config
from gapo_megatron.config.rules import check_paths, input_paths
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.folder import check_replaceable, is_marked
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.cpu_engine import check_engine_here
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.imports import without_garbage_collection
from gapo_megatron.run.processes import choose_cuda_queues, quiet_libraries


def train_supervised(config: Config) -> float:
    """Train `supervised.num_steps` steps and write the result to `model.hf_dir`.

    Returns:
        Mean loss per response token of the last step, before its update; the same on every rank.

    Collectives: creates the process group; every rank trains, rank 0 writes.

    Raises:
        ConfigError: no [supervised] section, `model.hf_dir` cannot hold the result, or
            `supervised.initial_hf_dir` cannot be used.
        DataError: names the file and the line.
    """
    settings = config.supervised
    if settings is None:
        raise ConfigError("supervised: this command needs a [supervised] section in the config")
    check_paths(config)
    target = config.model.hf_dir
    inputs = input_paths(config)
    del inputs["model.hf_dir"]  # created here
    is_ours = is_marked(target, made_by="sft")
    check_replaceable(target, field="model.hf_dir", inputs=inputs, is_ours=is_ours)
    facts = check_model_folder(settings.initial_hf_dir, field="supervised.initial_hf_dir")
    check_shapes(facts, config.parallel, config.model)
    # No engine runs here; a run that starts from the result may use other machines.
    try:
        check_engine_here(facts, field="supervised.initial_hf_dir", folder=settings.initial_hf_dir)
    except ConfigError as error:
        warnings.warn(f"{error}: a run on this machine cannot train the result", stacklevel=2)
    choose_cuda_queues(ranks_per_layer=config.parallel.ranks_per_layer)
    quiet_libraries()
    # Imported here: torch, transformers and Megatron-core take seconds that the checks do not need.
    with without_garbage_collection():
        from gapo_megatron.run import supervised

    return supervised.run(config, settings, facts)


def main() -> None:
    """Parse the command line and train; see `fail_fast` for exit codes."""
    parser = argparse.ArgumentParser(
        prog="python -m gapo_megatron.sft", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("config", help="TOML file with a [supervised] section")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    with fail_fast():
        train_supervised(load_config(arguments.config, arguments.overrides))


if __name__ == "__main__":
    main()
