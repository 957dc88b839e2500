"""Devices: data-sheet peaks, and the efficiencies that are reached of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gapo_megatron.errors import ConfigError

GIB = 2**30
CPU_NAME = "cpu"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device and its links, at peak rates; `Efficiency` holds the reached share of them."""

    name: str
    memory_bytes: int
    """Device memory as torch reports it, a little less than the data sheet's figure."""
    bf16_flops: float
    """Dense bfloat16 operations per second."""
    fp8_flops: float
    fp32_flops: float
    """Peak of float32 outside the tensor cores: float32 runs of this package do not use TF32."""
    bandwidth: float
    """Memory, bytes per second."""
    link_bandwidth: float
    """Bandwidth to the other devices of a node, bytes per second in one direction."""
    network_bandwidth: float
    """Bandwidth to other nodes, bytes per second in one direction, for each device."""
    host_bandwidth: float
    """Bandwidth to the node's memory, bytes per second in one direction, all devices at once."""
    compute_capability: float
    """NVIDIA's compute capability; 0 on a CPU."""
    gpus_per_node: int = 8
    host_memory_bytes: int = 2 * 10**12
    """Memory of a node: NVIDIA's DGX H100 and H200 have 2 TB."""

    def flops(self, precision: str) -> float:
        """Peak of the layers' matrix products at `model.precision`, operations per second.

        Raises:
            ConfigError: the device has no products of that precision.
        """
        if precision == "fp8" and not self.fp8_flops:
            raise ConfigError(f"model.precision ('fp8'): a {self.name} has no fp8 products")
        flops = {"fp32": self.fp32_flops, "fp8": self.fp8_flops}
        return flops.get(precision, self.bf16_flops)  # fp16 has the rate of bf16

    def group_bandwidth(self, size: int, *, stride: int) -> float:
        """Bytes per second in one direction that a ring over a process group moves for each member.

        Args:
            size: ranks of the group.
            stride: distance of neighbouring members in rank order.

        A group within a node runs at `link_bandwidth`. A group over several nodes runs as many
        rings side by side as it has members (network adapters) in the node with the fewest:
        min(link_bandwidth, members x network_bandwidth).
        """
        members = self.members_in_node(size, stride=stride)
        if members == size:
            return self.link_bandwidth
        return min(self.link_bandwidth, members * self.network_bandwidth)

    def members_in_node(self, size: int, *, stride: int) -> int:
        """Smallest number of a process group's members on one node; `size` if a node holds all.

        Groups begin at multiples of size x stride and nodes at multiples of gpus_per_node, so a
        group's part in a node is a multiple of the greatest common divisor of the two.
        """
        return max(1, math.gcd(size * stride, self.gpus_per_node) // stride)


# For each device: memory; operations per second in bf16, fp8 and fp32; bytes per second of memory,
# link, network and host; compute capability.
#
# NVLink 4: 900 GB/s is both directions together. Network: one ConnectX-7 of 400 Gb/s for each GPU,
# as in NVIDIA's DGX H100 and H200 reference systems; assumed for H20 nodes too. Host
# memory: 16 lanes of PCIe 5 for each GPU, 128 GB/s both directions together. A100 and B200 have
# figures of their own beside them.
_DATA_SHEETS = (
    # NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 and 1,979 fp8 without sparsity, 67 fp32,
    # 80 GB, 3.35 TB/s.
    Gpu("h100", int(79.1 * GIB), 989e12, 1979e12, 67e12, 3.35e12, 450e9, 50e9, 64e9, 9.0),
    # NVIDIA H200 SXM data sheet: the H100's products, 141 GB, 4.8 TB/s.
    Gpu("h200", int(139.7 * GIB), 989e12, 1979e12, 67e12, 4.8e12, 450e9, 50e9, 64e9, 9.0),
    # NVIDIA H20, as its resellers print the data sheet: 148 TFLOP/s bf16, 296 fp8, 44 fp32,
    # 96 GB, 4.0 TB/s, NVLink 900 GB/s.
    Gpu("h20", int(95.0 * GIB), 148e12, 296e12, 44e12, 4.0e12, 450e9, 50e9, 64e9, 9.0),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16 without sparsity, no fp8 (a layout in it
    # is refused), 19.5 fp32, 80 GB, 2,039 GB/s, NVLink 3 of 600 GB/s; DGX A100: 200 Gb/s of
    # network for each GPU, PCIe 4, 2 TB.
    Gpu("a100", int(79.1 * GIB), 312e12, 0.0, 19.5e12, 2.039e12, 300e9, 25e9, 32e9, 8.0),
    # NVIDIA DGX B200 data sheet, of 8 GPUs: 36 PFLOP/s bf16 and 72 fp8 with sparsity (half of
    # it without), 1,440 GB, 64 TB/s, NVLink 5 of 1.8 TB/s for each GPU, 400 Gb/s of network
    # for each, 2 TB; 80 TFLOP/s fp32 as resellers print it.
    Gpu("b200", int(178.0 * GIB), 2250e12, 4500e12, 80e12, 8.0e12, 900e9, 50e9, 64e9, 10.0),
)
GPUS = {gpu.name: gpu for gpu in _DATA_SHEETS}
_NAN = math.nan
CPU = Gpu(CPU_NAME, 0, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, 0.0, gpus_per_node=1)
"""A process on a CPU, whose rates are unknown: measured runs have no MFU, and none is planned."""


def find_gpu(name: str) -> Gpu:
    """The device of that name.

    Raises:
        ConfigError: the device is unknown; lists the known ones.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu {name!r} is not one of {', '.join(GPUS)}")
    return GPUS[name]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Reached shares of a device's peaks, and the overhead of calls: the model's free parameters.

    Shares are of a data-sheet peak, in (0, 1]; seconds are per item that the name says. The
    defaults are assumptions for Hopper GPUs, each with its source. None has been measured with this
    package on a GPU.
    """

    matmul: float = 0.45
    """Share of the peak FLOP/s, over a whole layer or head with norms and copies. Megatron-LM's
    README reports 41 to 48 % of the peak for dense models on H100, communication included."""
    bandwidth: float = 0.7
    """Share of the memory bandwidth in decoding and the optimizer. Assumed: streaming kernels reach
    0.8 to 0.9, small ones less."""
    communication: float = 0.75
    """Share of a link's or network's bandwidth. NCCL's tests reach about 0.8 on NVLink with large
    messages; layers send smaller ones."""
    layer_s: float = 1e-4
    """Overhead of a layer's forward pass of one micro-batch: kernel launches. Assumed."""
    collective_s: float = 2e-5
    """Latency of one collective. Assumed."""
    update_s: float = 0.05
    """Overhead of one optimizer step: gradient norm, flags, metrics. Assumed."""
    decode_step_s: float = 0.006
    """Overhead of one decoding step: scheduling, launches, sampling. Assumed."""
    decode_sequence_s: float = 2e-5
    """Overhead of one sequence in one decoding step: each request has its own seed. Assumed."""
    verdict_s: float = 3.1e-3
    """One verdict on one worker: mathematics, benchmarks/RESULTS.md (639 a second on two workers).
    Programs take longer."""
    tensor_s: float = 5e-4
    """Overhead of one Hugging Face tensor in a weight sync: names, checks, copies. Assumed."""


ASSUMED = Efficiency()
