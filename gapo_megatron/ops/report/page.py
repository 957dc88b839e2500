"""The report as one HTML page: no scripts, no requests, readable in light, in dark and on paper."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gapo_megatron.evaluate.table import Table
from gapo_megatron.ops.report.exhibit import Exhibit

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #5a5a66; --paper: #fff;
  --line: #d5d5dd; --card: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ee; --soft: #a9a9b8; --paper: #16161a;
  --line: #3a3a44; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 0 0 .3rem; }
p, li { max-width: 46rem; }
.soft, figcaption small, .notes { color: var(--soft); font-size: .85rem; }
a { color: inherit; }
.grid { columns: 21rem; column-gap: 1.5rem; margin-top: 1.2rem; }
.grid section { break-inside: avoid; margin: 0 0 1.2rem; }
section { border-top: 1px solid var(--line); padding-top: .8rem; margin-top: 1.2rem; }
figure { margin: 0; }
img { background: var(--card); border-radius: 4px; padding: 6px; width: 100%; max-width: 26rem;
  box-sizing: border-box; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
@media print { :root { --ink: #000; --soft: #333; --paper: #fff; --line: #bbb; }
  body { font-size: 10pt; margin: 0; max-width: none; } section { break-inside: avoid; }
  .grid { columns: 2; } table { font-size: 7pt; } a { text-decoration: none; } }
"""


@dataclass(frozen=True)
class Written:
    """An exhibit and its files, by ending, relative to the page."""

    title: str
    exhibit: Exhibit
    files: Mapping[str, str]


def render(
    *,
    title: str,
    lead: Sequence[str],
    written: Sequence[Written],
    left_out: Mapping[str, str],
    runs: Mapping[str, Sequence[str]],
    folder: Path,
) -> str:
    """The page.

    Args:
        title: title of the page.
        lead: paragraphs below it.
        written: in order; tables stand across the page, figures side by side.
        left_out: title -> reason.
        runs: method -> folders.
        folder: folder of the page; figures are read from there, and become part of it.
    """
    tables = [one for one in written if one.exhibit.table is not None]
    figures = [one for one in written if one.exhibit.figure is not None]
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{escape(text)}</p>' for text in lead),
        *(_section(one, folder) for one in tables[:1]),
        '<div class="grid">',
        *(_section(one, folder) for one in figures),
        "</div>",
        *(_section(one, folder) for one in tables[1:]),
    ]
    if left_out:
        lines = (f"<li>{escape(name)}: {escape(why)}.</li>" for name, why in left_out.items())
        body += ["<section><h2>Figures without data</h2><ul>", *lines, "</ul></section>"]
    rows = (
        f"<dt>{escape(method)}</dt><dd>{'<br>'.join(map(escape, folders))}</dd>"
        for method, folders in runs.items()
    )
    body += ['<section><h2>Runs</h2><dl class="soft">', *rows, "</dl></section>"]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',  # or a browser asks the server for one
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _section(written: Written, folder: Path) -> str:
    exhibit, files = written.exhibit, written.files
    parts = [f"<section><h2>{escape(written.title)}</h2>"]
    links = " ".join(f'<a href="{escape(path)}">{kind.upper()}</a>' for kind, path in files.items())
    aid = f"<p>{escape(exhibit.aid)}</p>"
    notes = "".join(f'<p class="notes">{escape(note)}</p>' for note in exhibit.notes)
    if exhibit.table is not None:
        parts += [aid, _table(exhibit.table), notes, f'<p class="soft">{links}</p>']
    if exhibit.figure is not None:
        drawn = base64.b64encode((folder / files["png"]).read_bytes()).decode()
        alt = escape(f"{written.title}. {exhibit.aid}")
        image = f'<img alt="{alt}" src="data:image/png;base64,{drawn}">'
        parts += [f"<figure>{image}<figcaption>{aid}{notes}<small>{links}</small></figcaption>"]
        parts += ["</figure>"]
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    lines = (
        "<tr>"
        + "".join(
            f"<td><b>{escape(cell)}</b></td>"
            if (number, place) in table.best
            else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    notes = "".join(f'<p class="notes">{escape(note)}</p>' for note in table.notes)
    return (
        f'<div class="scroll"><table><caption class="soft">{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{notes}"
    )
