"""A Transformer Engine whose installation stopped half-way, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gapo_megatron.compat import transformer_engine
from gapo_megatron.errors import ConfigError
from tests.broken_transformer_engine import KINDS, install_broken
from tests.messages import mentions

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="a real one is installed"
)

IMPORT_MEGATRON = """\
from gapo_megatron.run.fail_fast import fail_fast
with fail_fast():
    import gapo_megatron.policy
"""


def run(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )


def check(done: subprocess.CompletedProcess[str], said: str) -> None:
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(mentions("transformer_engine", said, "tools/setup_gpu_env.sh"), line)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize("kind", ["core_alone", "other_torch"])
def test_what_megatron_core_does_not_take_for_its_absence_is_named(
    kind: str, tmp_path: Path
) -> None:
    said = install_broken(tmp_path, kind)
    check(run(tmp_path, "-c", IMPORT_MEGATRON), said)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_where_there_is_a_gpu_it_must_load(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Megatron-core takes it for absent, and builds layers of nothing."""
    said = install_broken(tmp_path, kind)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        with pytest.raises(ConfigError, match=mentions("transformer_engine")) as caught:
            transformer_engine.is_installed()
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert kind == "core_alone" or said in str(caught.value)


def test_without_a_gpu_megatron_core_may_take_it_for_absent(tmp_path: Path) -> None:
    install_broken(tmp_path, "no_dependency")
    done = run(tmp_path, "-c", IMPORT_MEGATRON)
    assert done.returncode == 0, done.stderr
