"""docs/planned_layouts.md, the only place where predictions of the planner are written down."""

from pathlib import Path

from benchmarks import planned


def test_the_tables_are_what_the_planner_says_now(capsys):
    planned.main()
    written = Path("docs/planned_layouts.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == written, f"run {planned.COMMAND}"
