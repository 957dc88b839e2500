"""From files as published to the folder of a problem file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gapo_megatron.data.rows import check_format, read_rows
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.hf.folder import new_folder
from gapo_megatron.hf.model_folder import TOKENIZER_FILES
from gapo_megatron.io.digest import code_sha256, file_sha256
from gapo_megatron.io.files import real
from gapo_megatron.ops.prepare.held_out import MANY_NGRAMS, MIN_SHARE, NUM_WORDS, HeldOut
from gapo_megatron.ops.prepare.journal import Journal
from gapo_megatron.ops.prepare.output import MANIFEST, Counts, Output
from gapo_megatron.ops.prepare.rules import Lengths, Rules
from gapo_megatron.ops.prepare.sources import Source

Progress = Callable[[str, float], None]
"""Told what is being done, and which share of it has been."""


def prepare(
    source: Source,
    inputs: Sequence[Path],
    output: Path,
    *,
    lengths: Lengths,
    held_out: HeldOut | None,
    options: dict[str, Any],
    progress: Progress,
) -> Counts:
    """Write a folder whose problems `read_prompts` reads: whole, or not at all.

    Equal inputs and options give equal bytes, interrupted or not: what was found out about a row
    stays in the `Journal`, and the same call goes on behind the last. Memory holds what `read_rows`
    says and, of a source that is deduplicated, what `Duplicates` says.

    Args:
        source: how rows are read.
        inputs: files, in the order of the output.
        output: folder to make; must not exist.
        lengths: longest prompt that stays.
        held_out: benchmarks, whose problems are dropped; None: no comparison.
        options: as the user gave them, JSON; recorded.
        progress: called after every row.

    Raises:
        ConfigError: the output exists or another process makes it, an input is given twice or has
            another format, or the tokenizer has no chat template.
        DataError: an input is no file, cannot be read or has another form, or no problem stays.
        RewardError: answers cannot be compared; see `Pool.judge`.
    """
    _check(inputs, lengths)
    made_of = {
        "source": source.name,
        "kind": source.kind,
        "options": options,
        "inputs": [{"path": str(p), "sha256": d} for p, d in _digests(inputs, progress).items()],
        "tokenizer": _tokenizer_files(lengths.tokenizer),
        "benchmarks": _describe(held_out) if held_out else None,
        "code": code_sha256("data", "rewards", "ops/prepare"),
    }
    num_bytes = sum(path.stat().st_size for path in inputs)
    with (  # the journal goes last: a disk that is full when the folder is published costs no rows
        Journal.open(output, belongs_to=made_of) as journal,
        new_folder(output, num_bytes=num_bytes - journal.num_bytes) as folder,
    ):
        rules = Rules(source, held_out=held_out, lengths=lengths)
        _look_at_rows(source, inputs, journal, rules, progress)
        counts = _write(folder, journal, rules, progress)
        if not counts.written:
            raise DataError(f"{', '.join(map(str, inputs))}: {_none_stays(counts, journal)}")
        if source.kind == "code":
            journal.link_tests(folder)
        outputs = _digests(sorted(folder.iterdir()), progress)
        by_name = {path.name: digest for path, digest in outputs.items()}
        manifest = made_of | {"counts": vars(counts), "outputs": by_name}
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    return counts


def _check(inputs: Sequence[Path], lengths: Lengths) -> None:
    if lengths.chat_template and not lengths.tokenizer.chat_template:
        raise ConfigError("a chat template is asked for and the tokenizer has none")
    for path in inputs:
        check_format(path)
    for path in inputs:
        if [real(other) for other in inputs].count(real(path)) > 1:
            raise ConfigError(f"input {path} is given twice")


def _none_stays(counts: Counts, journal: Journal) -> str:
    """How many rows broke which rule, and of unreadable ones the first with the reason."""
    why = ", ".join(f"{number:,} {rule}" for rule, number in sorted(counts.dropped.items()))
    text = f"none of {counts.read:,} rows stays" + (f": {why}" if why else "")
    for entry in journal:
        if entry["rule"] == "unreadable":
            reason = f"{entry['details']['reason']:.500}"
            return f"{text}. The first of these, {entry['file']}:{entry['row']}: {reason}"
    return text


def _look_at_rows(
    source: Source, inputs: Sequence[Path], journal: Journal, rules: Rules, progress: Progress
) -> None:
    """Fill the journal, behind what it has."""
    sizes = [path.stat().st_size for path in inputs]
    for entry in journal:
        rules.look_again(entry)
    last = journal.last
    first = [str(path) for path in inputs].index(last["file"]) if last else 0
    for index, path in enumerate(inputs[first:], start=first):
        after = last["row"] if last and index == first else 0
        rows = read_rows(path, columns=source.columns, optional=source.optional, after=after)
        for number, row, share in rows:
            entry, tests = rules.look(path, number, row, index=journal.num_rows)
            journal.add(entry, tests=tests)
            progress("reading rows", (sum(sizes[:index]) + share * sizes[index]) / sum(sizes))


def _write(folder: Path, journal: Journal, rules: Rules, progress: Progress) -> Counts:
    """Problems and what was dropped, now that every answer is known."""
    duplicates = rules.duplicates
    if duplicates:
        progress("comparing answers", 0.0)
        duplicates.compare()
        progress("comparing answers", 1.0)
    with Output.open(folder) as out:
        for entry in journal:
            rule, details, text = entry["rule"], entry["details"], entry["problem"]
            if duplicates and rule != "unreadable" and (answers := duplicates.answers(text)):
                out.counts.contradictory_texts += rule != "duplicate"
                rule, details = "contradictory", {"same_as": duplicates.first(text)}
                details["answers"] = answers
            if rule:
                out.drop(entry, rule, details)
            else:
                out.keep(entry)
            progress("writing", out.counts.read / journal.num_rows)
    return out.counts


def _digests(paths: Sequence[Path], progress: Progress) -> dict[Path, str]:
    digests = {}
    for number, path in enumerate(paths):
        progress("hashing", number / len(paths))
        digests[path] = file_sha256(path)
    progress("hashing", 1.0)
    return digests


def _tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests of what lengths depend on, by name."""
    folder = Path(tokenizer.name_or_path)
    there = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return {name: file_sha256(folder / name) for name in there}


def _describe(held_out: HeldOut) -> dict[str, Any]:
    return {
        "ngram_words": NUM_WORDS,
        "min_share": MIN_SHARE,
        "many_ngrams": MANY_NGRAMS,
        "files": {
            name: [{"path": str(path), "sha256": file_sha256(path)} for path in paths]
            for name, paths in held_out.files.items()
        },
        "absent": held_out.absent,
    }
