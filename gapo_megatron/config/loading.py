"""Reading a config: TOML files and `section.key=value` overrides.

Precedence: defaults < the file named by `base` < the file itself < overrides. Nothing changes a
config after it is loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gapo_megatron import user_code
from gapo_megatron.config.errors import explain
from gapo_megatron.config.roles import ALLOWABLE, is_setting, role_of
from gapo_megatron.config.schema import Config
from gapo_megatron.config.user_method import find_method, values_of
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import apply_override, read_tree, set_value

AnySection = TypeVar("AnySection", bound=BaseModel)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, settings: Mapping[str, Any] = {}
) -> Config:
    """Read a TOML file and the file that its `base` names, apply overrides, validate.

    Args:
        path: the file.
        overrides: `section.key=value`.
        settings: values by `section.key`; they take precedence over the overrides.

    Raises:
        ConfigError: names the file or override, the field, the value and the rule; or code of the
            user's own is not the code that the file records (`reward.code` and the like). A method
            with another digest than the recorded one is not executed.
    """
    tree = read_tree(Path(path))
    for override in overrides:
        apply_override(tree, override)
    for name, value in settings.items():
        set_value(tree, name, value)
    source = str(path)
    return _with_own_method(_with_digests(parse_config(tree, source=source), source), source)


def load_recorded(path: str | Path) -> Config:
    """Read the resolved config of a run's folder, with the digests that the run had.

    It neither executes nor looks for the code that the config names.

    Raises:
        ConfigError: names the file, the field, the value and the rule.
    """
    tree = read_tree(Path(path))
    check_recorded(tree, source=str(path))
    return parse_config(tree, source=str(path))


def check_recorded(tree: object, *, source: str) -> None:
    """Refuse a recorded config whose method is code, but which does not say what it is.

    Raises:
        ConfigError: names the method.
    """
    objective = tree.get("objective") if isinstance(tree, dict) else None
    if not isinstance(objective, dict) or objective.get("own_method") is not None:
        return
    name = objective.get("method")
    if isinstance(name, str) and user_code.is_code(name):
        raise ConfigError(
            f"{source}: objective.method ({name!r}) is code, and there is no objective.own_method: "
            "what a run recorded is read without executing code"
        )


def _with_own_method(config: Config, source: str) -> Config:
    """Load a user method, whose digests agree, and record what it is."""
    objective = config.objective
    if not user_code.is_code(objective.method):
        return config
    own, recorded = values_of(find_method(objective.method)), objective.own_method
    if recorded not in (None, own):
        raise ConfigError(
            f"{source}: objective.own_method ({recorded!r}) is not what {objective.method} defines "
            f"now: {own!r}. Restore what it imports, or remove this line"
        )
    objective = objective.model_copy(update={"own_method": own})
    return config.model_copy(update={"objective": objective})


def _with_digests(config: Config, source: str) -> Config:
    """Fill in `code` of each section that names user code."""
    digests = {
        name: with_digest(section, name=name, source=source)
        for name, section in config
        if getattr(section, "code_names", []) or getattr(section, "code", "")
    }
    return config.model_copy(update=digests) if digests else config


def with_digest(section: AnySection, *, name: str, source: str) -> AnySection:
    """Fill in `code` of a section, if it names user code.

    Args:
        section: a section of a config.
        name: its name.
        source: where it was read, for messages.

    Raises:
        ConfigError: `code` has the digest of other code; or a file does not exist.
    """
    names, recorded = getattr(section, "code_names", []), getattr(section, "code", "")
    if not names and not recorded:
        return section
    keys = {value: f"{name}.{key}" for key, value in section if isinstance(value, str)}
    digests = (user_code.digest(one, setting=keys.get(one, name)) for one in names)
    text = " ".join(filter(None, digests))
    if recorded not in ("", text):
        now = f"those of {', '.join(names)} are {text!r} now" if names else "it names none"
        raise ConfigError(
            f"{source}: {name}.code ({recorded!r}) is the SHA-256 of files with code of your own, "
            f"but {now}. Restore the files, or remove this line"
        )
    return section.model_copy(update={"code": text})


def parse_config(tree: dict[str, Any], *, source: str) -> Config:
    """Validate a nested dict; one ConfigError lists every problem."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        lines = [explain(item, Config) for item in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "\n  ".join(lines)) from None
    _check_allowed(config, source)
    return config


def _check_allowed(config: Config, source: str) -> None:
    """Refuse names in `run.allow_changes` that no rule protects."""
    for name in config.run.allow_changes:
        if name in ALLOWABLE:
            continue
        near = difflib.get_close_matches(name, ALLOWABLE, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "write it as section.key"
        if is_setting(name):
            hint = "this setting needs no allowance"
            if role_of(name).fixed:
                hint = "this setting never changes in a run"
        raise ConfigError(
            f"{source}: run.allow_changes ({name!r}) must name settings that decide what a run "
            f"learns; {hint}"
        )
