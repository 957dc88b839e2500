"""Packages that are not what their names promise, for the doctor to find."""

from __future__ import annotations

import os
from pathlib import Path

NVIDIA_APEX = Path(__file__).parent / "stand_ins" / "nvidia_apex"


def install(
    site: Path, name: str, version: str, files: dict[str, str], *, summary: str = ""
) -> None:
    """Put modules and their metadata into a folder for PYTHONPATH, as pip would."""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    fields = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    (info / "METADATA").write_text(fields)


def install_web_apex(site: Path) -> None:
    """What `pip install apex` fetches: importing it without its web framework fails."""
    files = {"apex/__init__.py": "from pyramid_mailer.interfaces import IMailer\n"}
    files |= {f"apex/{name}.py": "" for name in ("forms", "models", "views")}
    summary = "Pyramid toolkit to add Velruse, Flash Messages,CSRF, ReCaptcha and Sessions"
    install(site, "apex", "0.9.10.dev0", files, summary=summary)


def install_nvidia_apex(site: Path, *, with_kernels: bool) -> None:
    """NVIDIA's, as its stand-in has it; like it, without kernels it can only be imported."""
    files = {
        str(path.relative_to(NVIDIA_APEX)): path.read_text()
        for path in NVIDIA_APEX.rglob("*.py")
        if with_kernels or path.parent != NVIDIA_APEX
    }
    install(site, "apex", "0.1", files)


def path_with(site: Path) -> dict[str, str]:
    """This process's environment, `site` before everything else on Python's path."""
    return {**os.environ, "PYTHONPATH": str(site)}
