"""Programs that a test puts in the place of others."""

from pathlib import Path


def write_program(path: Path, script: str) -> Path:
    """An executable file of bash; its folder is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path
