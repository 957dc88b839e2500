"""Devices and links, and what is reached of them."""

import pytest

from gapo_megatron.errors import ConfigError
from gapo_tools.planner.hardware import GPUS, find_gpu
from tests.messages import mentions
from tests.scaling_setup import H200


def test_groups_over_several_nodes_use_the_adapters_of_their_members():
    assert H200.group_bandwidth(8, stride=8) == 50e9
    assert H200.group_bandwidth(8, stride=1) == 450e9
    assert H200.group_bandwidth(16, stride=4) == 100e9
    # Three nodes, TP 2, PP 4, DP 3: ranks 6, 8 and 10 are in two nodes, 6 alone in its own.
    assert H200.group_bandwidth(3, stride=2) == 50e9
    assert H200.group_bandwidth(4, stride=2) == 450e9


def test_other_devices_are_refused():
    with pytest.raises(ConfigError, match=mentions("'h300'", *GPUS)):
        find_gpu("h300")
