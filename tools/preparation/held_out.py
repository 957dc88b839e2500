"""Find benchmark problems in training data."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.errors import ConfigError
from gapo_tools.evaluation.benchmarks import BENCHMARKS, without_request

NUM_WORDS = 8
"""Words of an n-gram. A changed word breaks so many n-grams, so longer ones find less."""
MIN_SHARE = 0.5
"""Share of a benchmark problem's n-grams that makes a text a hit; less is stock phrases."""
MANY_NGRAMS = 50
"""With fewer n-grams, half may be stock phrases: `MIN_SHARE` then applies to both texts."""

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A problem of a benchmark, found in another text."""

    id: str
    """Benchmark and row, as in `Benchmark.load`."""
    share: float
    """Share of the problem's n-grams in the text; 1 if both have the same words."""
    text: str
    """The problem's own words, shown in dropped.jsonl."""


class HeldOut:
    """The problems of all benchmarks in a folder."""

    def __init__(self, data_dir: Path) -> None:
        """Read the benchmarks.

        Args:
            data_dir: one folder per benchmark (docs/evaluation.md); some may be missing.

        Raises:
            ConfigError: there is no benchmark, or a folder has no file or too many.
            DataError: a file cannot be read.
        """
        present = [one for one in BENCHMARKS.values() if (data_dir / one.folder).is_dir()]
        if not present:
            names = ", ".join(one.folder for one in BENCHMARKS.values())
            raise ConfigError(f"{data_dir} has no benchmark; it must hold one of: {names}")
        self.files: dict[str, list[Path]] = {}
        """Files of each benchmark."""
        self.absent = [name for name in BENCHMARKS if BENCHMARKS[name] not in present]
        self._problems: list[tuple[str, str, int]] = []  # id, text, number of n-grams
        self._by_words: dict[str, int] = {}
        self._by_ngram: dict[str, list[int]] = {}
        for benchmark in present:
            paths = self.files[benchmark.name] = benchmark.find_files(data_dir)
            for id, prompt in benchmark.prompts(*paths):
                text, number = without_request(prompt), len(self._problems)
                words = _words(text)
                ngrams = _ngrams(words)
                self._by_words.setdefault(" ".join(words), number)
                for ngram in ngrams:
                    self._by_ngram.setdefault(ngram, []).append(number)
                self._problems.append((id, text, len(ngrams)))

    def find(self, text: str) -> Hit | None:
        """The benchmark problem whose n-grams `text` shares most, if at least `MIN_SHARE`.

        A text with the same words (letters and digits; case and punctuation do not matter) is the
        problem itself; problems shorter than an n-gram are only found this way. A text that
        contains the whole problem is a hit however much else it contains.
        """
        words = _words(text)
        same = self._by_words.get(" ".join(words))
        if same is not None:
            return self._hit(same, share=1.0)
        ngrams = _ngrams(words)
        shared = Counter(number for ngram in ngrams for number in self._by_ngram.get(ngram, ()))
        hits = []
        for number, count in shared.items():
            total = self._problems[number][2]
            needed = MIN_SHARE * (total if total >= MANY_NGRAMS else max(total, len(ngrams)))
            if count >= min(needed, total):
                hits.append(self._hit(number, share=count / total))
        return min(hits, key=lambda hit: (-hit.share, hit.id), default=None)

    def _hit(self, number: int, *, share: float) -> Hit:
        id, text, _ = self._problems[number]
        return Hit(id, share, text)


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def _ngrams(words: list[str]) -> set[str]:
    return {
        " ".join(words[start : start + NUM_WORDS]) for start in range(len(words) - NUM_WORDS + 1)
    }
