"""Devices and links, and what is reached of them."""

import pytest
import torch

from gapo_megatron.errors import ConfigError
from gapo_megatron.ops.plan import hardware
from gapo_megatron.ops.plan.hardware import GPUS, find_gpu, measure_cpu
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
    with pytest.raises(ConfigError, match=mentions("'h300'", *GPUS, "cpu")):
        find_gpu("h300")


def test_this_machine_is_a_device():
    """Rates of a real machine: above a toy's, below a supercomputer's."""
    cpu = measure_cpu()
    assert cpu.name == "cpu"
    assert 1e9 < cpu.fp32_flops < 1e14
    assert 1e8 < cpu.bandwidth < 1e13
    assert cpu.memory_bytes > 2**30


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("2", 2)])
def test_a_process_is_measured_with_the_threads_it_trains_with(monkeypatch, given, threads):
    """Those of OMP_NUM_THREADS, which torch has by then; else one, as slurm/launch.sh starts it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(hardware, "_measure_cpu", torch.get_num_threads)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert measure_cpu() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
