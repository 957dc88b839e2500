"""User code, named in a config: `path/to/file.py:NAME` or `package.module:NAME`.

Only names in a config or on a command line are loaded, never names that a model folder or a data
file contains (docs/security.md). Standard library only: verifier workers load code, too.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from gapo_megatron.errors import ConfigError, said

_PACKAGE = Path(__file__).resolve().parent
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_code(value: str) -> bool:
    """Whether a setting names code instead of a choice of this package."""
    return ":" in value


def load(name: str, *, setting: str) -> Any:
    """Import the object that `name` names; a file is executed once per process.

    Args:
        name: `path/to/file.py:NAME`, relative to the working directory, or `package.module:NAME`.
            The folder of a file is appended to `sys.path`, so that it can import its neighbours.
        setting: setting or option with this value, for messages.

    Raises:
        ConfigError: names setting, value, and what is missing or which line failed.
    """
    where, attribute = _split(name, setting=setting)
    module = _import(where, setting=setting, name=name)
    found: Any = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        public = [one for one in vars(module) if not one.startswith("_")]
        hint = f"did you mean {near[0]!r}?" if near else f"it defines {', '.join(public) or '-'}"
        raise ConfigError(f"{setting} ({name!r}): {where} does not define {attribute!r}; {hint}")
    return found


def load_with_settings(
    name: str, settings: Mapping[str, Any], *, setting: str
) -> functools.partial[Any]:
    """Load a function or class with the config's settings as keyword arguments; call it with more.

    Args:
        name: as in `load`.
        settings: sub-table `settings` of the config. A class that is a pydantic model checks their
            types when it is called.
        setting: setting that names the code, for messages.

    Raises:
        ConfigError: as `load`; or it cannot be called, or does not take one of the settings.
    """
    found = load(name, setting=setting)
    if not callable(found):
        raise ConfigError(
            f"{setting} ({name!r}) must be a function or a class, not {type(found).__name__}"
        )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [key for key, one in inspect.signature(found).parameters.items() if one.kind in by_name]
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"{setting} ({name!r}): unknown setting {key!r}; it takes {', '.join(known) or '-'}"
            )
    return functools.partial(found, **settings)


def build(made: functools.partial[Any], *arguments: Any, setting: str) -> Any:
    """Call a class from `load_with_settings`; returns its object.

    Raises:
        ConfigError: whatever it raises, with its type and message.
    """
    try:
        with contained():
            return made(*arguments)
    except Exception as error:
        raise ConfigError(
            f"{setting}: {made.func.__qualname__} with settings {made.keywords}: {said(error)}"
        ) from error


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Run user code; turns SystemExit into RuntimeError. KeyboardInterrupt, Ctrl-C, passes."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(said(error)) from error


def find_file(name: str, *, setting: str) -> Path:
    """File that holds the code, without importing it (parent packages of a module are imported).

    Raises:
        ConfigError: there is no such file or module.
    """
    where, _ = _split(name, setting=setting)
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise ConfigError(
                f"{setting} ({name!r}): no file {path.absolute()}; paths are relative to the "
                "working directory"
            )
        return path
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError) as error:  # ValueError: a module without a spec, __main__
        raise ConfigError(f"{setting} ({name!r}): {error}") from None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"{setting} ({name!r}): no module {where!r} in this environment (PYTHONPATH?); for a "
            "file write path/to/file.py:NAME"
        )
    path = Path(spec.origin)
    if not path.is_file():
        raise ConfigError(
            f"{setting} ({name!r}): {where} ({spec.origin}) has no file, whose SHA-256 a run "
            "keeps; write a function around it in a file of your own"
        )
    return path


def digest(name: str, *, setting: str) -> str:
    """SHA-256 of the file that holds the code; files that it imports are not included.

    Empty for a file of this package: it changes with the version, as all of the package does.
    """
    path = find_file(name, setting=setting)
    if path.resolve().is_relative_to(_PACKAGE):
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _split(name: str, *, setting: str) -> tuple[str, str]:
    where, _, attribute = name.rpartition(":")
    is_place = where.endswith(".py") or _MODULE.fullmatch(where)
    if not is_place or not attribute.isidentifier():
        raise ConfigError(
            f"{setting} ({name!r}) must be path/to/file.py:NAME or package.module:NAME"
        )
    return where, attribute


def _import(where: str, *, setting: str, name: str) -> ModuleType:
    path = find_file(name, setting=setting)
    try:
        with contained():
            if not where.endswith(".py"):
                return importlib.import_module(where)
            return _execute(path.resolve())
    except ConfigError:
        raise
    except Exception as error:
        frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
        lines = [one.lineno for one in frames if one.filename == str(path.resolve())]
        line = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{setting} ({name!r}): importing {path}{line}: {said(error)}") from error


def _execute(path: Path) -> ModuleType:
    """Import a file as a module whose name no other file has; once per process."""
    key = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"user_{path.stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: its files must not hide installed packages
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path  # ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before its execution: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
