"""Published step times against the model, without tuning."""

import pytest

from benchmarks.anchors import ANCHORS
from gapo_megatron.ops.plan.hardware import Efficiency


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_published_step_times(anchor):
    """Within a factor of two, without tuning: docs/planned_layouts.md has how far."""
    predicted = anchor.predict(Efficiency()).total_s
    assert 0.5 < predicted / anchor.published["total"] < 2.0
