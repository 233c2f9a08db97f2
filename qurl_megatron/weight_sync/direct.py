"""Write weights straight into the parameters of servers on the learner's machine.

A server hands out its parameters once: each of its processes names the parts of tensors that it
holds, and describes their memory in texts, with which the learner's ranks attach to it. On a GPU
this is CUDA's inter-process memory, through PyTorch's own sharing of tensors. Without a GPU it is a
file in shared memory. The server must not replace its parameters afterwards.

From then on every learner rank copies its quantized parts into that memory. Nothing is gathered,
and nothing is sent. The learner's parts and the server's may be cut differently:

    learner, 1 rank       q_proj [0:256]
    server, 2 ranks       [0:128] | [128:256]

The servers must be paused while ranks write.
"""

import base64
import errno
import os
import pickle
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from qurl_megatron.machine.memory import lack_of_shared_memory
from qurl_megatron.quantization.checksum import Part, part_of_key
from qurl_megatron.weight_sync.delta import Change


def describe(tensor: Tensor) -> str:
    """Return a text with which another process of this machine can `attach` to a tensor.

    On a CPU the tensor's storage moves to shared memory; tensors that share it move along. The
    memory has no name, only a file descriptor of this process, so nothing is left when both end.
    Neither uses torch's manager of shared memory, whose end would end the other.

    Raises:
        OSError: /dev/shm has no room for it. The kernel would end the process at the first write.
    """
    if tensor.is_cuda:
        described: object = reduce_tensor(tensor)[1]
    else:
        storage = tensor.untyped_storage()
        if not storage.is_shared() and (problem := lack_of_shared_memory(storage.nbytes())):
            raise OSError(errno.ENOSPC, problem)
        descriptor, num_bytes = storage._share_fd_cpu_()
        memory = f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes
        layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        described = memory, layout
    return base64.b64encode(pickle.dumps((tensor.is_cuda, described))).decode()


def attach(text: str) -> Tensor:
    """Return the tensor of a text from `describe`, in another process of the same machine.

    The two tensors share memory. The text is unpickled, so its sender must be trusted.
    """
    on_gpu, described = pickle.loads(base64.b64decode(text))
    if on_gpu:
        return rebuild_cuda_tensor(*described)
    (file, num_bytes), (dtype, offset, shape, stride) = described
    mapped = torch.from_file(file, shared=True, size=num_bytes, dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(mapped.untyped_storage(), offset, shape, stride)


class ServerParameters:
    """The parameters of servers, into which this process can write."""

    def __init__(self) -> None:
        self._servers: dict[str, dict[str, list[Part]]] = {}  # parts by tensor name
        self._paused: list[str] = []
        self.machines: frozenset[str] = frozenset()  # of all servers to write to

    def attach(self, servers: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        """Attach to the parameters of servers on this machine.

        A server has a mapping for each of its ranks, from keys of `checksum.part_key` to texts of
        `describe`.
        """
        for server, ranks in servers.items():
            parts: dict[str, list[Part]] = {}
            for rank in ranks:
                for key, text in rank.items():
                    name, row, column = part_of_key(key)
                    part = Part(attach(text), row, column)
                    parts.setdefault(name, []).append(part)
            self._servers[server] = parts

    def keep(self, machines: Mapping[str, str], paused: Collection[str]) -> None:
        """Detach from all servers but these, and write to the `paused` ones only.

        Args:
            machines: each server's machine, by the server's name. This process stays attached only
                to servers on its own machine.
        """
        self._servers = {name: held for name, held in self._servers.items() if name in machines}
        self._paused = [name for name in paused if name in self._servers]
        self.machines = frozenset(machines[name] for name in paused)

    def write(self, change: Change) -> None:
        """Write a part of a tensor wherever a paused server holds some of it."""
        for server in self._paused:
            for values, row, column in self._servers[server].get(change.name, ()):
                change.write_to(values, row, column)
