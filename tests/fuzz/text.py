"""Configs, overrides, studies, rows, and the small files of a run's folder."""

from __future__ import annotations

import itertools
import json
import shutil
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import gapo_megatron
from gapo_megatron.config import Config, load_config, parse_config
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.train import check_before_imports
from gapo_tools.demonstration.demo_task import write_tokenizer
from gapo_tools.dry_run.command import print_dry_run
from gapo_tools.jobs.study import read_study
from tests.fuzz.campaign import Target
from tests.fuzz.mutate import (
    Damage,
    damage_bytes,
    damage_file,
    damage_toml,
    damage_tree,
    json_text,
)
from tests.problem_files import read_problems

_WARM_START = Path(gapo_megatron.__file__).parent / "models/published/warm_start.json"


def _whole_config(folder: Path) -> None:
    """Every section and key is stated."""
    (folder / "model").mkdir()
    shutil.copyfile(_WARM_START, folder / "model/config.json")
    config = parse_config(
        {
            "run": {"output_dir": "run", "num_steps": 10},
            "model": {"hf_dir": "model", "precision": "fp32"},
            "data": {"train_path": "train.jsonl", "eval_path": "eval.jsonl"},
            "rollout": {"max_response_tokens": 64},
            "reward": {"kind": "exact"},
            "objective": {"eps_low": 0.003, "eps_high_max": 0.005},
            "evaluation": {"every_steps": 5},
            "checkpoint": {"keep_steps": [5]},
            "supervised": {"initial_hf_dir": "initial", "train_path": "s.jsonl", "num_steps": 4},
        },
        source="fuzz",
    )
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")


def _use_config(config: Config) -> dict[str, Any]:
    """What a dry run and a start do with it, short of imports."""
    print_dry_run(config, world_size=1)
    check_before_imports(config)
    return config.model_dump(mode="json")


def _names_setting(message: str, damage: Damage) -> bool:
    return any(name in message for name in (Path(damage.file).name, *damage.settings))


def _differs(stated: dict[str, Any], state: dict[str, Any]) -> str:
    """Where a config does not hold what a file states."""
    for section, values in stated.items():
        if not isinstance(values, dict):
            return f"{section} is no section, and was accepted"
        for key, value in values.items():
            held = (state.get(section) or {}).get(key)
            same = held == value and isinstance(held, bool) == isinstance(value, bool)
            if not same:
                return f"{section}.{key} is {held!r}; the file says {value!r}"
    again = parse_config(tomllib.loads(to_toml(Config(**state))), source="again")
    return "" if again.model_dump(mode="json") == state else "the run's own config.toml differs"


def _config_target() -> Target:
    def damage(rng: Random, folder: Path) -> Damage:
        how = damage_toml if rng.random() < 0.85 else damage_file
        return how(rng, folder, "config.toml")

    def explains(folder: Path, _: Damage, state: Any, __: Any) -> str:
        text = (folder / "config.toml").read_text(encoding="utf-8")
        return _differs(tomllib.loads(text), state)

    return Target(
        name="config",
        prepare=_whole_config,
        damage=damage,
        read=lambda folder: _use_config(load_config("config.toml")),
        explains=explains,
        names=_names_setting,
        share=4,
    )


def _study_target() -> Target:
    def prepare(folder: Path) -> None:
        _whole_config(folder)
        (folder / "study.toml").write_text(
            'config = "config.toml"\noutput_dir = "study"\n[grid]\n'
            'objective.method = ["gspo", "gapo"]\nrun.seed = [0, 1]\n[[runs]]\n'
            "objective.eps_low = 0.002\nresources.nodes = 2\n[resources]\n"
            'time = "12:00:00"\npartition = "gpu"\naccount = "a"\ntasks_per_node = 4\n'
        )

    def read(folder: Path) -> Any:
        study = read_study("study.toml")
        return [
            (str(run.run_dir), run.config.model_dump(mode="json"), run.resources.model_dump())
            for run in study.runs
        ]

    def explains(folder: Path, _: Damage, state: Any, __: Any) -> str:
        tree = tomllib.loads((folder / "study.toml").read_text(encoding="utf-8"))
        if "config" not in tree:  # a plain config is a study of one run
            return ""
        grids = tree.get("grid", {})
        grids = grids if isinstance(grids, list) else [grids]
        stated = [run for grid in grids for run in _combinations(_flat(grid))]
        stated += [_flat(run) for run in tree.get("runs", [])]
        if len(stated) != len(state):
            return f"{len(state)} runs; the file says {len(stated)}"
        for settings, (run_dir, config, resources) in zip(stated, state, strict=True):
            if not Path(run_dir).is_relative_to(folder / tree["output_dir"]):
                return f"a run in {run_dir!r}"
            held = {**_flat(config), **_flat({"resources": resources})}
            for name, value in (_flat({"resources": tree.get("resources", {})}) | settings).items():
                if held.get(name) != value:
                    return f"{name} is {held.get(name)!r}; the file says {value!r}"
            if odd := [one for one in resources.values() if not str(one).isprintable()]:
                return f"resources {odd}"
            if what := _differs({}, config):
                return what
        return ""

    return Target(
        name="study",
        prepare=prepare,
        damage=lambda rng, folder: (damage_toml if rng.random() < 0.9 else damage_file)(
            rng, folder, "study.toml"
        ),
        read=read,
        explains=explains,
        names=_names_setting,
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _combinations(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    names, values = list(axes), itertools.product(*axes.values())
    return [dict(zip(names, one, strict=True)) for one in values] if axes else []


# --- rows ----------------------------------------------------------------------------------------

_ANSWERS = {
    "exact": "25",
    "math": "\\frac{1}{2}",
    "code": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}),
    "instructions": json.dumps({"instructions": [{"id": "punctuation:no_comma"}]}),
}


def _rows_target(kind: str) -> Target:
    tokenizers: list[Any] = []

    def prepare(folder: Path) -> None:
        rows = [
            {"id": f"p{i}", "prompt": f"{i}+1=", "answer": _ANSWERS[kind], "level": "easy"}
            for i in range(6)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_tokenizer(["0123456789+=>"], folder / "model")
        shutil.copyfile(_WARM_START, folder / "model/config.json")
        tokenizers.append(load_tokenizer(folder / "model"))

    def damage(rng: Random, folder: Path) -> Damage:
        if rng.random() < 0.15:
            return damage_file(rng, folder, "train.jsonl")
        lines = (folder / "train.jsonl").read_bytes().splitlines()
        at = rng.randrange(len(lines))
        if rng.random() < 0.3:
            lines[at], what = damage_bytes(rng, lines[at])
        else:
            tree, what = damage_tree(rng, json.loads(lines[at]))
            lines[at] = json_text(tree).encode("utf-8", "surrogatepass")
        (folder / "train.jsonl").write_bytes(b"\n".join(lines))
        return Damage("train.jsonl", f"line {at + 1}: {what}")

    def read(folder: Path) -> Any:
        problems = read_problems(
            "train.jsonl",
            tokenizer=tokenizers[0],
            max_prompt_tokens=64,
            kind=kind,
            chat_template=False,
        )
        return [(p.id, tuple(p.token_ids), p.answer, p.level) for p in problems]

    def explains(folder: Path, _: Damage, state: Any, whole: Any) -> str:
        stated = []
        text = (folder / "train.jsonl").read_text(encoding="utf-8")
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                row = json.loads(line)
                ids = tuple(tokenizers[0](row["prompt"])["input_ids"])
                # Without an id, a row has the number of its line; integers are read as text.
                id = str(number) if row.get("id") is None else str(row["id"])
                answer = _answer_text(row["answer"], kind)
                stated.append((id, ids, answer, row.get("level") or ""))
        if stated != state:
            return f"read {state!r}; the file says {stated!r}"
        json.dumps(state, ensure_ascii=False).encode("utf-8")
        return ""

    return Target(f"rows:{kind}", prepare, damage, read, explains)


def _answer_text(answer: Any, kind: str) -> str:
    """What stands in a row as the text that a verifier gets."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list) and kind in ("exact", "math"):
        texts = [_answer_text(one, kind) for one in answer]
        return texts[0] if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)
    return json.dumps(answer, ensure_ascii=False)


def targets() -> list[Target]:
    """All of this file."""
    return [
        _config_target(),
        _study_target(),
        *map(_rows_target, _ANSWERS),
    ]
