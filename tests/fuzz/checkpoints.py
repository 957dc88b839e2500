"""Checkpoints, by everything that reads one: a resume, a branch, a start from them, a conversion.

A process group of one rank must be up; see `tests.dist.single_rank`.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from gapo_megatron import checkpoint
from gapo_megatron.conversion.directions import Options, megatron_to_hf
from gapo_megatron.convert.hf import read_hf
from gapo_megatron.policy.load import check_megatron_dir
from gapo_megatron.policy.model import read_hf_config
from tests.attempt_setup import make_attempt
from tests.distributed.checkpoint_setup import (
    build,
    make_config,
    make_model,
    save,
    train_one_update,
)
from tests.fuzz.campaign import RAN, Target
from tests.fuzz.models import digest
from tests.fuzz.mutate import Damage, damage_file, damage_tree, json_text

_OLDER, _NEWEST = "run/checkpoints/step_00000001", "run/checkpoints/step_00000002"
_MANIFEST = "manifest.json"


class _Trained:
    """A policy of a few thousand parameters, and a run of it with two checkpoints."""

    def __init__(self) -> None:
        self._older: dict[str, Any] = {}
        self._made: Path | None = None

    def prepare(self, folder: Path) -> None:
        if self._made:
            shutil.copytree(self._made, folder, dirs_exist_ok=True)
            return
        self._made = folder
        make_model(folder / "model", hidden_size=32)
        self.config = make_config("model", layout="single")
        self.policy = build(self.config)
        for step in (1, 2):
            train_one_update(self.policy, seed=step)
            save(folder / "run", self.policy, self.config, step=step)
            if step == 1:
                self._older = self._state(1)

    def resume(self, folder: Path) -> dict[str, Any]:
        """As a run that goes on."""
        hf_config = read_hf_config("model")
        checkpoint.check_resume("run", hf_config, self.config)
        found = checkpoint.load_latest("run", policy=self.policy, config=self.config)
        assert found is not None, "the run would begin anew"
        return self._state(found.step)

    def branch(self, folder: Path) -> dict[str, Any]:
        """As a run that begins at the newest one."""
        settings = self.config.checkpoint.model_copy(update={"branch_from": _NEWEST})
        run = self.config.run.model_copy(update={"output_dir": "other", "num_steps": 9})
        config = self.config.model_copy(update={"checkpoint": settings, "run": run})
        point = checkpoint.check_branch(config, read_hf_config("model"))
        assert point is not None
        state = point.trainer_state()
        checkpoint.begin_branch(point, config, make_attempt(folder / "other"))
        found = checkpoint.load_latest("other", policy=self.policy, config=config)
        assert found is not None and found.trainer_state == state
        return self._state(found.step)

    def start(self, folder: Path) -> dict[str, Any]:
        """As a run whose `model.megatron_dir` it is."""
        model = self.config.model.model_copy(update={"megatron_dir": _NEWEST})
        config = self.config.model_copy(update={"model": model})
        check_megatron_dir(config, read_hf_config("model"))
        self.policy.load_megatron_weights(_NEWEST)
        return {"weights": self._weights()}

    def convert(self, folder: Path) -> dict[str, Any]:
        """As a conversion to Hugging Face."""
        options = Options(mode="none", num_threads=1)
        megatron_to_hf(Path(_NEWEST), Path("out"), options, hf_config_dir=Path("model"))
        return {"weights": {name: digest(tensor) for name, tensor in read_hf("out")}}

    def explains(self, folder: Path, damage: Damage, state: Any, whole: Any) -> str:
        """Going on from the older one is right, too."""
        return "" if state == self._older else "other weights, or another step"

    def _state(self, step: int) -> dict[str, Any]:
        optimizer = hashlib.sha256()
        for name, tensor in _tensors("", self.policy.optimizer.state_dict()):
            optimizer.update(name.encode() + digest(tensor).encode())
        return {
            "step": step,
            "num_updates": self.policy.num_updates,
            "weights": self._weights(),
            "optimizer": optimizer.hexdigest(),
        }

    def _weights(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.policy.iterate_hf_weights()}


def _tensors(name: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    items = tree.items() if isinstance(tree, dict) else ()
    items = enumerate(tree) if isinstance(tree, list | tuple) else items
    for key, value in items:
        yield from _tensors(f"{name}/{key}", value)


class _RunsCode:
    """A pickle of it leaves `RAN` in the working directory when it is loaded."""

    def __reduce__(self) -> Any:
        return open, (RAN, "w")


def _damage(rng: Random, folder: Path) -> Damage:
    files = sorted(str(p.relative_to(folder)) for p in (folder / _NEWEST).rglob("*") if p.is_file())
    file = rng.choice(files)
    kind = rng.randrange(10)
    if kind < 5:
        return damage_file(rng, folder, file)
    if kind == 5:
        file = rng.choice([one for one in files if one.endswith((".metadata", ".pt"))])
        (folder / file).write_bytes(pickle.dumps(_RunsCode(), protocol=2))
        return _signed(folder, Damage(file, "a pickle that runs code"), rng)
    if kind == 6:
        other = f"run/checkpoints/step_{rng.choice(('00000003', '00000002_1', '00000000', '2'))}"
        (folder / _NEWEST).rename(folder / other)
        return Damage(other, f"was {_NEWEST}")
    path = folder / _NEWEST / _MANIFEST
    document = json.loads(path.read_text(encoding="utf-8"))
    if kind == 7:
        path = folder / _NEWEST / "trainer_state.json"
        tree, what = damage_tree(rng, json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json_text(tree), encoding="utf-8", errors="surrogatepass")
        return _signed(folder, Damage(f"{_NEWEST}/trainer_state.json", what), rng)
    tree, what = damage_tree(rng, document)
    return _sign(folder, tree, what)


def _signed(folder: Path, damage: Damage, rng: Random) -> Damage:
    """Often with a manifest that knows of it: by somebody who means harm."""
    if rng.random() < 0.3:
        return damage
    path = folder / _NEWEST / _MANIFEST
    document = json.loads(path.read_text(encoding="utf-8"))
    content = (folder / damage.file).read_bytes()
    document["files"][str(Path(damage.file).relative_to(_NEWEST))] = {
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    _sign(folder, document, "")
    return damage


def _sign(folder: Path, document: Any, what: str) -> Damage:
    """Write a manifest whose own digest is right."""
    name = f"{_NEWEST}/{_MANIFEST}"
    text = json_text(document)
    if isinstance(document, dict):
        document.pop("sha256", None)
        try:
            text = json.dumps(document, sort_keys=True, separators=(",", ":"))
            digest_of = hashlib.sha256(text.encode()).hexdigest()
            text = json.dumps(document | {"sha256": digest_of})
        except TypeError:  # text that no JSON writer writes
            text = json_text(document)
    (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return Damage(name, what)


def _names(message: str, damage: Damage) -> bool:
    # Of a checkpoint that has another name: the one that is not there, or the one that is.
    return any(
        part in message
        for part in (Path(damage.file).name, Path(damage.file).parts[2], Path(_NEWEST).name)
    )


def targets() -> list[Target]:
    """All of this file."""
    run = _Trained()
    return [
        Target(name, run.prepare, _damage, read, run.explains, _names, share)
        for name, read, share in (
            ("resume", run.resume, 4),
            ("branch", run.branch, 2),
            ("initial weights", run.start, 2),
            ("conversion", run.convert, 2),
        )
    ]
