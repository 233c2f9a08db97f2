"""The GPUs that a run can be planned for, and how many of them a node has.

Rates come from the vendor's datasheets: without sparsity, links in one direction, and one network
adapter per GPU as in the vendor's DGX. The reached fraction of a rate was fitted to the H100 only
(`step_time`), and is assumed for the other GPUs.
"""

from dataclasses import dataclass

from qurl_megatron.config.schema import ConfigError

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    capability: tuple[int, int]  # compute capability
    memory_bytes: int  # as PyTorch reports it
    hbm_bytes_per_s: float
    bf16_flops: float  # FLOP/s
    eight_bit_flops: float  # FLOP/s in INT8 or FP8
    nvlink_bytes_per_s: float
    infiniband_bytes_per_s: float
    host_bytes_per_s: float  # PCIe


H100 = Gpu("H100", (9, 0), int(79.1 * GIB), 3.35e12, 989e12, 1979e12, 450e9, 50e9, 64e9)
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", (8, 0), int(79.1 * GIB), 2.039e12, 312e12, 624e12, 300e9, 25e9, 32e9),
        H100,
        Gpu("H200", (9, 0), int(139.8 * GIB), 4.8e12, 989e12, 1979e12, 450e9, 50e9, 64e9),
        Gpu("B200", (10, 0), int(178.3 * GIB), 8e12, 2250e12, 4500e12, 900e9, 50e9, 64e9),
    )
}


@dataclass(frozen=True)
class Node:
    """The GPUs of one node, which NVLink connects; InfiniBand connects the nodes."""

    gpu: Gpu = H100
    gpus: int = 8
    host_bytes: int = 2 * 10**12  # memory of the host: that of a DGX H100

    def link_bytes_per_s(self, ranks: int) -> float:
        """Return the rate of the link that connects this many ranks, in bytes per second."""
        gpu = self.gpu
        return gpu.nvlink_bytes_per_s if ranks <= self.gpus else gpu.infiniband_bytes_per_s


DGX_H100 = Node()


def node_of(gpu: str, gpus: int) -> Node:
    """Return a node by the name of its GPU.

    Raises:
        ConfigError: there is no such GPU in `GPUS`.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: GPUs are {', '.join(GPUS)}")
    return Node(GPUS[gpu], gpus)
