"""Checkpoints, by everything that reads one: a resume, a branch, a start from them, a conversion.

A process group of one rank must be up; see `tests.dist.single_rank`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from gapo_megatron import checkpoint
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.policy.load import check_megatron_dir
from gapo_megatron.policy.model import read_hf_config
from gapo_tools.conversion.directions import Options, megatron_to_hf
from tests.attempt_setup import make_attempt
from tests.damage import Trap, sign
from tests.distributed.checkpoint_setup import (
    make_config,
    make_model,
    make_state,
    save,
    stored,
    train_one_update,
)
from tests.distributed.policy_setup import load_policy
from tests.fuzz.campaign import RAN, Target
from tests.fuzz.models import digest
from tests.fuzz.mutate import (
    Damage,
    damage_bytes,
    damage_file,
    damage_json,
    damage_tree,
    hostile,
    json_text,
)

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
        self.policy = load_policy(self.config)
        for step in (1, 2):
            train_one_update(self.policy, seed=step)
            save(folder / "run", self.policy, self.config, step=step)
            if step == 1:
                self._older = self._state(make_state(1))

    def resume(self, folder: Path) -> dict[str, Any]:
        """As a run that goes on."""
        hf_config = read_hf_config("model")
        checkpoint.check_resume("run", hf_config, self.config)
        found = checkpoint.load_latest("run", policy=self.policy, config=self.config)
        assert found is not None, "the run would begin anew"
        return self._state(found)

    def branch(self, folder: Path) -> dict[str, Any]:
        """As a run that begins at the newest one."""
        settings = self.config.checkpoint.model_copy(update={"branch_from": _NEWEST})
        run = self.config.run.model_copy(update={"output_dir": "other", "num_steps": 9})
        config = self.config.model_copy(update={"checkpoint": settings, "run": run})
        point = checkpoint.check_branch(config, read_hf_config("model"))
        assert point is not None
        state = point.state()
        checkpoint.begin_branch(point, config, make_attempt(folder / "other"))
        found = checkpoint.load_latest("other", policy=self.policy, config=config)
        assert found is not None and (found.step, found.source) == (state.step, state.source)
        return self._state(state)  # the window is that of another objective after a change of it

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
        return "" if damage.signed or state == self._older else "other weights, or another step"

    def _state(self, state: checkpoint.State) -> dict[str, Any]:
        optimizer = hashlib.sha256()
        for name, tensor in _tensors("", self.policy.optimizer.state_dict()):
            optimizer.update(name.encode() + digest(tensor).encode())
        return {
            "state": stored(state),
            "random": (random.getstate()[1][:9], digest(torch.get_rng_state())),
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


def _damage(rng: Random, folder: Path) -> Damage:
    root = folder / _NEWEST
    files = sorted(str(p.relative_to(folder)) for p in root.rglob("*") if p.is_file())
    pickles = [one for one in files if one.endswith((".metadata", ".pt"))]
    kind = rng.randrange(12)
    if kind < 5:
        return damage_file(rng, folder, rng.choice(files))
    if kind == 5:
        other = f"run/checkpoints/step_{rng.choice(('00000003', '00000002_1', '00000000', '2'))}"
        root.rename(folder / other)
        return Damage(other, f"was {_NEWEST}")
    if kind < 8:  # the manifest itself
        path = root / _MANIFEST
        tree, what = damage_tree(rng, json.loads(path.read_text(encoding="utf-8")))
        return _sign_document(path, tree, what)
    if kind == 8:
        file = f"{_NEWEST}/trainer_state.json"
        done = damage_json(rng, folder, file)
    elif kind == 9:
        done = Damage(rng.choice(pickles), "a pickle that runs code")
        (folder / done.file).write_bytes(pickle.dumps(Trap(Path(RAN)), protocol=2))
    elif kind == 10:
        done = _damage_metadata(rng, folder)
    else:
        content, what = damage_bytes(rng, (folder / (file := rng.choice(pickles))).read_bytes())
        (folder / file).write_bytes(content)
        done = Damage(file, what)
    if rng.random() < 0.3:
        return done
    sign(root)
    return replace(done, what=f"{done.what}; signed", signed=True)


def _damage_metadata(rng: Random, folder: Path) -> Damage:
    """What `.metadata` says of one tensor, or where it lies."""
    path = folder / _NEWEST / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = rng.choice(list(metadata.storage_data))
    held, tensor = metadata.storage_data[index], metadata.state_dict_metadata.get(index.fqn)
    value, what = hostile(rng, rng.choice((0, "x", 1.5))), rng.randrange(8)
    if what == 0:
        metadata.storage_data.pop(index)
    elif what == 1:
        metadata.state_dict_metadata.pop(index.fqn, None)
    elif what == 2:
        held.relative_path = rng.choice(("../x", "/etc/passwd", "common.pt", value))
    elif what == 3:
        held.offset = value
    elif what == 4:
        held.length = value
    elif what == 5 and hasattr(tensor, "chunks"):
        tensor.chunks = rng.choice((tensor.chunks * 2, tensor.chunks[1:], [value]))
    elif what == 6 and hasattr(tensor, "size"):
        tensor.size = rng.choice((type(tensor.size)((2**40, 2**40)), type(tensor.size)(()), value))
    else:
        metadata.state_dict_metadata = value
    path.write_bytes(pickle.dumps(metadata))
    return Damage(f"{_NEWEST}/.metadata", f"{index.fqn}: {what}, {str(value)[:40]!r}")


def _sign_document(path: Path, document: Any, what: str) -> Damage:
    """Write a manifest whose own digest is right, where it is JSON."""
    text = json_text(document)
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        document = json.loads(text)
        document.pop("sha256", None)
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        text = json.dumps(document | {"sha256": hashlib.sha256(canonical.encode()).hexdigest()})
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return Damage(f"{_NEWEST}/{_MANIFEST}", what)


def _names(message: str, damage: Damage) -> bool:
    path = Path(damage.file)
    if path.name == _MANIFEST:  # or what it says of a file, which that is not
        return Path(_NEWEST).name in message
    if path.name.startswith("step_"):  # renamed
        return path.name in message or Path(_NEWEST).name in message
    # What `.metadata` says of a tensor may be told by its folder and the tensor's name.
    return path.name in message or (
        path.name in (".metadata", "metadata.json") and Path(_NEWEST).name in message
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
