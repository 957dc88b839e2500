"""The language study's page quotes what its archive gives."""

from __future__ import annotations

import re
from pathlib import Path

from studies.archive import read_archive
from studies.language.tables import table

HERE = Path(__file__).parent


def test_the_page_says_what_the_archive_says() -> None:
    found = table(read_archive(HERE))
    assert (HERE / "table.md").read_text().endswith(f"\n\n{found}")
    text = (HERE / "README.md").read_text().partition("After 10 steps (")[2]
    quoted = re.findall(r"([+-]?\d+\.\d) \[([+-]?\d+\.\d), ([+-]?\d+\.\d)\]", text)
    assert len(quoted) > 20
    for mean, low, high in quoted:
        pattern = rf"\+?{re.escape(mean)} \[\+?{re.escape(low)}, \+?{re.escape(high)}\]"
        assert re.search(pattern, found), (mean, low, high)
