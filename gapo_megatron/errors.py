"""Errors a user can act on. Each is a standard exception too: `except ValueError` works."""

from typing import Any

_LONGEST = 200


def printable(text: str, *, most: int = 1000, kept: str = "") -> str:
    """Text of others (a model, a file, a library, a server) for a message: one line, cut.

    Control characters, line breaks and lone surrogates are escaped. Call it wherever such text
    enters a message. Log handlers and last messages call it, too, and keep line breaks (`kept`).
    """
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode()
        for one in cut
    )


def shown(value: Any) -> str:
    """repr(value) for a message, cut to its length."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def said(error: BaseException) -> str:
    """Type and message of an exception of code of others, as a message can hold it."""
    name = type(error).__name__
    try:
        return printable(f"{name}: {error}")
    except Exception as second:
        return f"{name} (its message raises {type(second).__name__})"


class GapoError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(GapoError, ValueError):
    """A setting, or a combination of them, that cannot run. Names field, value and rule."""


class DataError(GapoError, ValueError):
    """An input file that breaks the schema. Names the file and the line."""


class RolloutError(GapoError, RuntimeError):
    """The generation engine failed or returned something other than what was asked for."""


class RewardError(GapoError, RuntimeError):
    """The processes that judge responses cannot run; a response they fail on is unknown instead."""


class WeightSyncError(GapoError, RuntimeError):
    """The engine's weights are not the trainer's: tensors or log-probs disagree."""


class ConversionError(GapoError, ValueError):
    """A tensor of one checkpoint side has no place on the other, or a shape does not fit."""


class CheckpointError(GapoError, RuntimeError):
    """A checkpoint that is absent, damaged, or belongs to another model."""


class DivergenceError(GapoError, FloatingPointError):
    """A loss or gradient that is not finite. Raised before the optimizer touches the weights."""


class FencedError(GapoError, RuntimeError):
    """A newer attempt has taken over the run: this one must not write any more."""


class MachineError(GapoError, OSError):
    """A disk or a network that does not do its part; elsewhere, or later, the same may work."""
