"""Draw the figures of README.md from the archive.

python -m studies.miniature.figures studies/miniature/data runs/studies/figures
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.figures import deviation_per_c, draw_per_c, over_training
from gapo_tools.reporting.style import style
from studies.archive import read_archive
from studies.miniature.intervention import CLIPPED, intervention

FIGURES = {
    "over_training": over_training,
    "deviation_per_c": deviation_per_c,
    "clip_fraction_per_c": partial(
        draw_per_c, name=CLIPPED, ylabel="rollouts clipped (%)", aid="Clipped correct rollouts."
    ),
}
"""Of the eight methods, in their usual settings; the intervention is of all runs."""


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    whole = Comparison.of(read_archive(arguments.archive), first="gapo")
    usual = Comparison([arm for arm in whole.arms if " " not in arm.label])
    with style():
        exhibits = {name: draw(usual) for name, draw in FIGURES.items()}
        exhibits["intervention"] = intervention(whole)
        for name, exhibit in exhibits.items():
            exhibit.write(arguments.output / name)


if __name__ == "__main__":
    main()
