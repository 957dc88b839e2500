"""Make the folder of a problem file from published files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gapo_megatron.data.rows import check_format, read_rows
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats.folder import new_folder
from gapo_megatron.formats.model_folder import TOKENIZER_FILES
from gapo_megatron.io.files import file_sha256, real
from gapo_megatron.user_code import digest, is_code
from gapo_tools.evaluation.code_digest import code_sha256
from gapo_tools.preparation.duplicates import Duplicates
from gapo_tools.preparation.held_out import MANY_NGRAMS, MIN_SHARE, NUM_WORDS, HeldOut
from gapo_tools.preparation.journal import Journal
from gapo_tools.preparation.output import MANIFEST, Counts, write_rows
from gapo_tools.preparation.rules import Entry, Lengths, Rules
from gapo_tools.preparation.sources import Source

Progress = Callable[[str, float], None]
"""Called with the name of the current activity and the share of it that is done."""
_CODE = (
    *("gapo_megatron/data", "gapo_megatron/rewards"),
    *("gapo_tools/evaluation/benchmarks.py", "gapo_tools/preparation"),
)


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
    """Write a folder of problems for `read_prompts`: the whole folder, or none.

    Equal inputs and options give equal bytes, also after an interruption: the `Journal` keeps the
    finding of each row. Memory: see `read_rows` and, for deduplicated sources, `Duplicates`.

    Args:
        source: how rows are read.
        inputs: files, in the order of the output.
        output: folder to make; must not exist.
        lengths: longest prompt to keep.
        held_out: benchmarks whose problems are dropped; None: no comparison.
        options: the user's options, as JSON; recorded in the manifest.
        progress: called after every row.

    Raises:
        ConfigError: the output exists or another process is writing it, an input is given twice or
            has an unknown format, or the tokenizer has no chat template.
        DataError: an input is not a regular file, cannot be read or has other columns, or every row
            is dropped.
        RewardError: answers cannot be compared; see `Pool.judge`.
    """
    _check(inputs, lengths)
    # Everything that the result depends on: a journal made of anything else is not continued.
    made_of = {
        "source": source.name,
        "kind": source.kind,
        "options": options,
        "inputs": [{"path": str(p), "sha256": d} for p, d in _digests(inputs, progress).items()],
        "tokenizer": _tokenizer_files(Path(lengths.tokenizer.name_or_path)),
        "benchmarks": _describe(held_out) if held_out else None,
        "code": code_sha256(*_CODE),
    }
    if is_code(source.kind):
        made_of["verifier"] = digest(source.kind, setting="--kind")
    num_bytes = sum(path.stat().st_size for path in inputs)
    advice = ": remove the folder, or name another --output"
    with (  # the journal is removed last: a full disk on publishing the folder loses no finding
        Journal.open(output, belongs_to=made_of) as journal,
        new_folder(output, num_bytes=num_bytes, advice=advice) as folder,
    ):
        rules = Rules(source, held_out=held_out, lengths=lengths)
        _look_at_rows(source, inputs, journal, rules, progress)
        if rules.duplicates:
            progress("comparing answers", 0.0)
            rules.duplicates.compare()
            progress("comparing answers", 1.0)
        counts = write_rows(folder, _judged(journal, rules.duplicates))
        if not counts.written:
            raise DataError(f"{', '.join(map(str, inputs))}: {_all_dropped(counts, journal)}")
        counts.contradictory_texts = rules.duplicates.num_contradictory if rules.duplicates else 0
        if source.kind == "code":
            journal.link_tests(folder)
        outputs = _digests(sorted(folder.iterdir()), progress)
        by_name = {path.name: digest for path, digest in outputs.items()}
        manifest = made_of | {"counts": vars(counts), "outputs": by_name}
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")
    return counts


def _check(inputs: Sequence[Path], lengths: Lengths) -> None:
    if lengths.chat_template and not lengths.tokenizer.chat_template:
        raise ConfigError("--chat-template: the tokenizer has no chat template")
    for path in inputs:
        check_format(path)
    for path in inputs:
        if [real(other) for other in inputs].count(real(path)) > 1:
            raise ConfigError(f"input {path} is given twice")


def _all_dropped(counts: Counts, journal: Journal) -> str:
    """Number of rows by the rule that dropped them, and the reason of the first unreadable one."""
    if not counts.read:
        return "there are 0 rows"
    why = ", ".join(f"{number:,} {rule}" for rule, number in sorted(counts.dropped.items()))
    text = f"all {counts.read:,} rows dropped: {why}"
    for entry in journal:
        if entry["rule"] == "unreadable":
            reason = f"{entry['details']['reason']:.500}"
            return f"{text}. First unreadable row, {entry['file']}:{entry['row']}: {reason}"
    return text


def _look_at_rows(
    source: Source, inputs: Sequence[Path], journal: Journal, rules: Rules, progress: Progress
) -> None:
    """Add the rows to the journal that it does not have yet."""
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


def _judged(journal: Journal, duplicates: Duplicates | None) -> Iterator[Entry]:
    """The entries of all rows, with the contradictions that only the last row may have shown."""
    for entry in journal:
        text = entry["problem"]
        if duplicates and entry["rule"] != "unreadable" and (answers := duplicates.answers(text)):
            details = {"same_as": duplicates.first(text), "answers": answers}
            entry |= {"rule": "contradictory", "details": details}
        yield entry


def _digests(paths: Sequence[Path], progress: Progress) -> dict[Path, str]:
    digests = {}
    for number, path in enumerate(paths):
        progress("hashing", number / len(paths))
        digests[path] = file_sha256(path)
    progress("hashing", 1.0)
    return digests


def _tokenizer_files(folder: Path) -> dict[str, str]:
    """Digests of the tokenizer's files, which prompt lengths depend on, by name."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return {name: file_sha256(folder / name) for name in names}


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
