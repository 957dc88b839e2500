"""Every table of the studies, from their archives: nothing is trained.

    python -m studies.tables

Writes arena/tables.md, miniature/table.md, language/table.md, and reversal/MODEL.md of each archive
in reversal/data. The tables of studies/adapter have no archive.
"""

from __future__ import annotations

from pathlib import Path

from studies.archive import read_archive
from studies.arena.arms import questions, read_scales
from studies.arena.jobs import Store
from studies.arena.report import all_tables
from studies.arena.sweep import best_settings, sweep
from studies.language import tables as language
from studies.miniature import claims
from studies.reversal import tables as reversal

HERE = Path(__file__).parent


def main() -> None:
    """Write all pages of tables; what stands before a page's first row stays."""
    nowhere = HERE / "arena" / "nowhere"  # the archive alone, whatever was trained since
    store, scales = Store(nowhere), read_scales()
    swept = sweep(store, scales)
    page = all_tables(questions(scales), store, swept, best_settings(swept, scales))
    (HERE / "arena" / "tables.md").write_text(page)
    _fill(HERE / "miniature" / "table.md", claims.page(read_archive(HERE / "miniature" / "data")))
    _fill(HERE / "language" / "table.md", language.table(read_archive(HERE / "language")))
    reversal.write_all()


def _fill(path: Path, tables: str) -> None:
    head, row, _ = path.read_text().partition("\n| ")
    assert row, f"{path} has no table"
    path.write_text(f"{head}\n{tables}")


if __name__ == "__main__":
    main()
