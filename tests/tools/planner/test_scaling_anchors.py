"""Published step times against the model, without tuning."""

from pathlib import Path

import pytest

from benchmarks.anchors import ANCHORS


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_published_step_times(anchor):
    """Within a factor of two, without tuning, and as docs/scaling.md says."""
    published, predicted = anchor.published["total"], anchor.predict().total_s
    assert 0.5 < predicted / published < 2.0
    row = f"| {anchor.name} | {published:g} | {predicted:.0f} |"
    assert row in Path("docs/scaling.md").read_text(encoding="utf-8")
