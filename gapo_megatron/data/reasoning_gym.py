"""Problems that the package reasoning-gym generates: rows like those of a file.

They depend on the config and on the package's version alone, and so are the same on every rank and
after a resume. Some of its families draw from the process's own random numbers, or depend on the
order of a set: a process of its own, with fixed seeds, generates them.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gapo_megatron.compat.reasoning_gym import REFUSED
from gapo_megatron.config import DataSource
from gapo_megatron.config.data_section import REASONING_GYM
from gapo_megatron.errors import ConfigError, printable, said
from gapo_megatron.rewards.reasoning_gym import (
    installed_version,
    make_answer,
    reference_answer,
)

Row = dict[str, Any]

CHUNK = 500
"""Problems of a family under one seed of the package, which adds a problem's number to its seed.
After as many draws without a new problem there are no more."""
MOST_WAIT_S = 600.0
"""Longest time without a line of the generator: for a problem, or draws without a new one."""
_ROOT = str(Path(__file__).parents[2])
_COMMAND = f"import sys; sys.path.insert(0, sys.argv[1]); import {__name__} as it; it.main()"
_SHOTS, _HELD_OUT, _TRAINING = "shots", "held_out", "training"


@dataclass
class Generated:
    """Rows of the sources, by name."""

    training: dict[str, list[Row]] = field(default_factory=dict)
    held_out: dict[str, list[Row]] = field(default_factory=dict)
    num_repeated: int = 0
    """Draws that were left out because there was the same question before."""


def generate(sources: Sequence[DataSource], *, most: int | None = None) -> Generated:
    """Generate the problems of sources; no question is in two rows.

    Held-out problems come first: they do not depend on the number of training problems.

    Args:
        sources: those of the kind `reasoning_gym`.
        most: rows of each part of each source, from the first; None: all; 0 only checks the
            families and their settings.

    Returns:
        Rows with `id`, `prompt`, `answer`, `level` (the family, with its level if the source
        gives some) and `verifier`.

    Raises:
        ConfigError: the package is missing, refuses a family or its settings, cannot generate,
            takes more than `MOST_WAIT_S` for a problem, or has too few different ones; or the
            family is of `REFUSED`. Names source and family.
    """
    made = Generated()
    if not sources:
        return made
    installed_version()
    order = {"sources": [one.model_dump(mode="json") for one in sources], "most": most}
    at, error = "", ""
    for value in _values(order):
        at = value.get("at", at)
        error = value.get("error", "")
        made.num_repeated = value.get("num_repeated", 0)
        if "row" in value:
            getattr(made, value["part"]).setdefault(value["source"], []).append(value["row"])
        if "failed" in value:
            error = f"{at or sources[0].name!r}: {value['failed']}"
    if error:
        raise ConfigError(f"data.source: {error}")
    return made


def _values(order: Row) -> Iterator[Row]:
    """The generator's values as they come; the last has `num_repeated`, `error` or `failed`."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(order).encode())
        given.seek(0)
        command = ["/usr/bin/env", "PYTHONHASHSEED=0", sys.executable, "-W", "ignore"]
        process = subprocess.Popen(
            [*command, "-c", _COMMAND, _ROOT], stdin=given, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
        reader.start()
        value: Row = {}
        try:
            while line := lines.get(timeout=MOST_WAIT_S):
                value = json.loads(line)
                yield value
            code = process.wait(timeout=MOST_WAIT_S)
        except (queue.Empty, subprocess.TimeoutExpired):
            yield {
                "failed": f"no problem in {MOST_WAIT_S:.0f} s: leave the family out, or change "
                "its settings or the source's seed"
            }
            return
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()
        if code or not {"num_repeated", "error"} & value.keys():
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            yield {
                "failed": f"the generator ended with {code}: {printable(''.join(last))}; leave the "
                "family out, or, if it was killed, see to the machine's memory"
            }


def _read_lines(file: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Hand over whole lines, and an empty one at the end: a kill may leave a part of a line."""
    for line in file:
        if line.endswith(b"\n"):
            lines.put(line)
    lines.put(b"")


class _Family:
    """Draws problems of a family, without end, for one part of a source."""

    def __init__(self, config: Row, *, seed: str) -> None:
        self.name, self.label, self.weight = config["name"], config["label"], config["weight"]
        self.shots = ""
        """Solved problems before each question."""
        self.credit = 0.0
        self.num_repeated = 0
        self._settings, self._seed = config["settings"], seed
        self._number = 0
        self._dataset = self._open(0)

    def draw(self, seen: set[str], *, prefix: str) -> Row:
        """The next problem whose question is not among those seen."""
        for _ in range(CHUNK):
            number, entry = self._number, self._next()
            question = " ".join(entry["question"].split())
            if question in seen:
                self.num_repeated += 1
                continue
            seen.add(question)
            return {
                "id": f"{prefix}{self.label}-{number}",
                "prompt": self.prompt_of(entry["question"]),
                "answer": make_answer(self.name, self._settings, entry),
                "level": self.label,
                "verifier": REASONING_GYM,
            }
        raise LookupError(
            f"the last {CHUNK} draws gave no new problem, after {self._number:,} in all: ask for "
            "fewer, or for harder ones"
        )

    def prompt_of(self, question: str) -> str:
        return f"{self.shots}Question: {question}\nAnswer:" if self.shots else question

    def _next(self) -> Row:
        chunk, place = divmod(self._number, CHUNK)
        if place == 0 and chunk:
            self._dataset = self._open(chunk)
        random.seed(f"{self._seed} {self._number}")
        with contextlib.suppress(ImportError):
            import numpy as np

            np.random.seed(random.getrandbits(32))
        entry: Row = self._dataset[place]
        self._number += 1
        return entry

    def _open(self, chunk: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.name in REFUSED:
            raise LookupError(
                "it executes code of a data set, with your rights, to make its problems: it is "
                "refused; leave it out"
            )
        if self.name not in DATASETS:
            near = difflib.get_close_matches(self.name, DATASETS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(sorted(DATASETS))}"
            raise LookupError(f"reasoning-gym {installed_version()} has no such family{hint}")
        digest = hashlib.sha256(f"{self._seed} {self.label} {chunk}".encode()).digest()
        seed = int.from_bytes(digest[:4]) >> 1
        return reasoning_gym.create_dataset(self.name, **self._settings, seed=seed, size=CHUNK)


class _RefusedError(Exception):
    pass


@contextlib.contextmanager
def _named(source: Row, family: Row) -> Iterator[None]:
    """Name source and family in what the package, or `_Family`, raises."""
    try:
        yield
    except Exception as error:
        why = str(error) if type(error) is LookupError else said(error)
        settings = f" with settings {family['settings']}" if family["settings"] else ""
        where = f"{source['name']!r}: family {family['name']!r}{settings}"
        raise _RefusedError(f"{where}: {why}") from None


def _labels(families: Sequence[Row]) -> list[str]:
    """Names of the families of a source; one that is there more than once has a number, too."""
    names = [one["name"] for one in families]
    return [
        f"{name}.{names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _with_levels(source: Row) -> Row:
    """The source with labels, and with a family for each level of a family."""
    families = []
    for one, label in zip(source["families"], _labels(source["families"]), strict=True):
        for level in one["levels"]:
            with _named(source, one):
                settings = _settings_of(one["name"], level) | one["settings"]
            weight = one["weight"] / len(one["levels"])
            name = f"{label}.level{level}"
            families.append(one | {"label": name, "weight": weight, "settings": settings})
        if not one["levels"]:
            families.append(one | {"label": label})
    return source | {"families": families}


def _settings_of(name: str, level: int) -> Row:
    """Settings of a family at a level of the package's curriculum, and at no easier one."""
    from reasoning_gym.coaching import RangeAttributeDefinition
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    if name not in DATASETS or name in REFUSED:
        return {}  # refused below
    if name not in CURRICULA:
        raise LookupError(
            f"levels ({level}): reasoning-gym {installed_version()} has no curriculum for it; give "
            "it several times, with settings"
        )
    curriculum = create_curriculum(name)
    attributes = curriculum.attributes.values()
    if level > (top := max((len(one.levels) for one in attributes), default=1) - 1):
        raise LookupError(f"levels ({level}): must be 0 to {top}")
    curriculum.set_global_level(level)
    context = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
    made = curriculum.generate_configuration(context=context)
    names = []
    for one in attributes:
        is_range = isinstance(one, RangeAttributeDefinition)
        names += [one.lower_field_name, one.upper_field_name] if is_range else [one.field_name]
    return {name: getattr(made, name) for name in names}


def _place(source: Row, family: Row) -> Row:
    """Where the generator is, for a message, and a sign that it goes on."""
    return {"at": f"{source['name']!r}: family {family['name']!r}"}


def _find_shots(source: Row, seen: set[str]) -> Generator[Row, None, list[str]]:
    """Return what stands before the questions of each family of a source."""
    texts = []
    for one in source["families"]:
        with _named(source, one):
            yield _place(source, one)
            family = _Family(one, seed=f"{source['seed']} {_SHOTS}")
            rows = []
            for _ in range(source["shots"]):
                rows.append(family.draw(seen, prefix=""))
                yield _place(source, one)
            answers = [reference_answer(row["answer"]) for row in rows]
            if None in answers:
                raise LookupError("shots: the package gives no answers to its problems")
        texts.append(
            "".join(
                f"Question: {row['prompt']}\nAnswer: {answer}\n\n"
                for row, answer in zip(rows, answers, strict=True)
            )
        )
    return texts


def _rows(source: Row, part: str, num: int, shots: list[str], seen: set[str]) -> Iterator[Row]:
    """Rows of a part of a source, its families in turns; the last value has the repetitions."""
    families = []
    for one, text in zip(source["families"], shots, strict=True):
        yield _place(source, one)
        with _named(source, one):
            families.append(_Family(one, seed=f"{source['seed']} {part}"))
        families[-1].shots = text
    total = sum(one.weight for one in families)
    for _ in range(num):
        for one in families:
            one.credit += one.weight / total
        chosen = max(families, key=lambda one: one.credit)
        chosen.credit -= 1
        config = source["families"][families.index(chosen)]
        yield _place(source, config)
        with _named(source, config):
            row = chosen.draw(seen, prefix="" if part == _TRAINING else "held_out-")
        yield {"source": source["name"], "part": part, "row": row}
    yield {"repeated": sum(one.num_repeated for one in families)}


def _generate(order: Row) -> Iterator[Row]:
    """What `generate` asks for: values per row, and the number of repetitions at the end."""
    most, seen, num_repeated = order["most"], set[str](), 0
    sources, shots = [_with_levels(one) for one in order["sources"]], {}
    for one in sources:
        shots[one["name"]] = yield from _find_shots(one, seen)
    for part, key in ((_HELD_OUT, "eval_size"), (_TRAINING, "size")):
        for source in sources:
            num = source[key] if most is None else min(source[key], most)
            for value in _rows(source, part, num, shots[source["name"]], seen):
                num_repeated += value.get("repeated", 0)
                if "repeated" not in value:
                    yield value
    yield {"num_repeated": num_repeated}


def main() -> None:
    """Answer the order on standard input: a line per value on standard output, and no other."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as lines:
        os.dup2(2, 1)
        try:
            for value in _generate(json.load(sys.stdin)):
                lines.write(json.dumps(value) + "\n")
        except _RefusedError as error:
            lines.write(json.dumps({"error": str(error)}) + "\n")
