"""The page as one file: data, style and script within it, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gapo_megatron.io.files import naming
from gapo_tools.viewer.data import RunData

_FOLDER = Path(__file__).parent
_SCRIPTS = ("base.js", "answers.js", "view.js")
"""In this order; the last one starts the page."""


def make_page(runs: Sequence[RunData], *, title: str, report: str = "", live: str = "") -> str:
    """The page of these runs.

    What a model wrote reaches the page as JSON in which no `<` is left, and the script only ever
    sets it as text; the page's policy runs no other script than its own.

    Args:
        runs: at least one.
        title: of the page.
        report: address of the report that the page belongs to; empty: none.
        live: state of the run, of a page that its server renews; empty: a file.
    """
    style, script = _read("view.css"), "\n".join(map(_read, _SCRIPTS))
    head = {"runs": [run.head() for run in runs], "report": report, "live": live}
    head["groups"] = [
        _summary(number, group) for number, run in enumerate(runs) for group in run.groups
    ]
    parts = [_data("head", head)]
    everything = [group for run in runs for group in run.groups]
    parts += [_data(f"group-{number}", group) for number, group in enumerate(everything)]
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if live else "")
    )
    return _read("view.html").format(
        generator=_generator(is_report=bool(report)),
        policy=html.escape(policy, quote=True),
        title=html.escape(title),
        style=style,
        data="\n".join(parts),
        script=script,
    )


def is_made(page: Path) -> bool:
    """Whether a file is a page of `make_page` that belongs to no report.

    Raises:
        MachineError: it cannot be read.
    """
    if not page.is_file():
        return False
    mark = f'<meta name="generator" content="{_generator(is_report=False)}">'
    with naming(page), open(page, "rb") as file:
        return mark.encode() in file.read(1000)


def _generator(*, is_report: bool) -> str:
    """Which command made the page: another one's is not overwritten."""
    return f"gapo_megatron {'report' if is_report else 'view'}"


def _summary(run: int, group: dict[str, Any]) -> dict[str, Any]:
    """What the list of problems shows of a group, without its tokens."""
    responses = group["responses"]
    return {
        "run": run,
        **{name: group[name] for name in ("step", "problem", "c", "k")},
        "n": len(responses),
        "verdicts": [one["verdict"] for one in responses],
        "clipped": sum(1 for one in responses if one.get("clipped")),
        "unknown": sorted({one["reason"] for one in responses if one["verdict"] == "unknown"}),
    }


def _data(name: str, value: Any) -> str:
    """A block of JSON: plain ASCII without `<`, so that nothing in it can end the block."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Names an inline script or style in the page's policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
