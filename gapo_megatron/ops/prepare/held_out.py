"""Problems of the benchmarks among those to train on."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.data.benchmarks import BENCHMARKS, without_request
from gapo_megatron.errors import ConfigError

NUM_WORDS = 8
"""Words of an n-gram: a reworded formula breaks as many n-grams, so long ones miss much."""
MIN_SHARE = 0.5
"""Share of a benchmark problem's n-grams found in a text; less is stock phrases alone."""
MANY_NGRAMS = 50
"""In a problem with fewer, half are stock phrases: `MIN_SHARE` is then asked of both texts."""

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A problem of a benchmark, found in another text."""

    id: str
    """Benchmark and row, as `Benchmark.load` names it."""
    share: float
    """Share of its n-grams that the text has; 1 if the two are the same words."""
    text: str
    """The problem's own words, for who reads the list of what was dropped."""


class HeldOut:
    """The problems of all benchmarks that a folder has."""

    def __init__(self, data_dir: Path) -> None:
        """Read them.

        Args:
            data_dir: one folder per benchmark (docs/evaluation.md); some may be absent.

        Raises:
            ConfigError: it has none, or a folder holds none or too many files.
            DataError: a file cannot be read.
        """
        there = [one for one in BENCHMARKS.values() if (data_dir / one.folder).is_dir()]
        if not there:
            names = ", ".join(one.folder for one in BENCHMARKS.values())
            raise ConfigError(f"{data_dir} has no folder of a benchmark ({names})")
        self.files: dict[str, list[Path]] = {}
        """By name of the benchmark."""
        self.absent = [name for name in BENCHMARKS if BENCHMARKS[name] not in there]
        self._problems: list[tuple[str, str, int]] = []  # id, text, number of n-grams
        self._by_words: dict[str, int] = {}
        self._by_ngram: dict[str, list[int]] = {}
        for benchmark in there:
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
        """The benchmark problem that `text` has most of, if that is at least `MIN_SHARE`.

        A text of the same words (letters and digits, whatever case and signs) is the problem
        itself; shorter problems than an n-gram are found by that alone. A text that has the whole
        problem may have as much else as it likes.
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
