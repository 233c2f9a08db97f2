"""Measure how a step's batch reaches the learner's ranks: `python benchmarks/batch.py`.

The ranks are processes of this machine, over gloo, without a model. Two ways take turns in the same
processes:

- "ragged" is the learner's: global rank 0 plans the micro batches, sends each data-parallel replica
  its sequences as tensors, and every rank lays them out. Of the scores, one number per sequence
  goes back (for samples.jsonl); all others stay where they are computed.
- "padded" is the plain way: one [batch, time] batch is pickled and broadcast to every rank, and
  log-probs and entropies [2, batch, time] are summed over all ranks.

It prints for each number of ranks the bytes that global rank 0 writes to its sockets, there and
back (Linux counts them in /proc/self/io), and the seconds until the last rank has its batch, as
medians with the smallest and largest. A ratio is padded / ragged, of the two runs of one round.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.learner.shares import Share, deal
from qurl_megatron.process import free_port
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES

MIB = 2**20
PROMPT, MEAN_RESPONSE, LOG_DEVIATION, MAX_RESPONSE = 256, 2048, 0.8, 8192  # tokens, lognormal
# Tensor-parallel and data-parallel sizes.
LAYOUTS = [(1, 2), (1, 4), (1, 8), (4, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256, help="number of sequences")
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each way")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core")))
    batch = make_batch(arguments.sequences)
    tokens, longest = len(batch.tokens), int(batch.lengths.max())
    print(
        f"{arguments.sequences} sequences of {tokens / arguments.sequences:.0f} tokens, at most "
        f"{longest}: {tokens / (arguments.sequences * longest):.0%} of [batch, time] are tokens"
    )
    print("ranks        way     MiB from rank 0    seconds")
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["qurl_megatron.learner.shares", "qurl_megatron.recipes.scaling_32b"]
    )
    for layout in LAYOUTS:
        ranks, port = layout[0] * layout[1], free_port()
        multiprocessing.start_processes(
            _run, (layout, arguments, port), nprocs=ranks, start_method="forkserver"
        )


def make_batch(sequences: int) -> TrainBatch:
    """Return a batch with the tensors that the policy's learner gets, of lognormal responses."""
    generator = torch.Generator().manual_seed(0)
    scale = MEAN_RESPONSE / torch.tensor(LOG_DEVIATION**2 / 2).exp()
    responses = torch.randn(sequences, generator=generator).mul(LOG_DEVIATION).exp() * scale
    lengths = PROMPT + responses.long().clamp(1, MAX_RESPONSE)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    tokens = torch.arange(len(starts))
    zeros = torch.zeros(len(starts))
    return TrainBatch(
        lengths=lengths,
        tokens=tokens.int(),
        loss_mask=tokens - starts >= PROMPT,
        behaviour_logprobs=zeros,
        advantages=zeros.clone(),
        loss_weights=zeros.clone(),
    )


def send_ragged(batch: TrainBatch, layout: LearnerConfig) -> Share:
    """Deal the batch out, and send one number per sequence back."""
    share = deal(batch, layout, ARCHITECTURES["Qwen2.5-32B"])
    share.collect([torch.zeros(1)] * len(share.numbers))
    return share


def send_padded(batch: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Broadcast the rows as a pickle, and sum their scores over all ranks."""
    received = [batch]
    dist.broadcast_object_list(received)
    assert received[0] is not None
    dist.all_reduce(torch.zeros(2, *received[0]["tokens"].shape))
    return received[0]


def pad(batch: TrainBatch) -> dict[str, Tensor]:
    """Return the batch as [batch, time] rows, with what every rank was sent of a padded batch."""
    rows = torch.nn.utils.rnn.pad_sequence(
        list(batch.tokens.long().split(batch.lengths.tolist())), batch_first=True
    )
    values = torch.zeros(rows.shape)
    return {
        "tokens": rows,
        "loss_mask": rows > 0,
        "behaviour_logprobs": values,
        "rewards": values.clone(),
        "advantages": values.clone(),
        "token_lags": rows.clone(),
    }


def _run(rank: int, sizes: tuple[int, int], arguments: argparse.Namespace, port: int) -> None:
    ranks = sizes[0] * sizes[1]
    device.extend_environment(
        {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
    )
    device.limit_threads(1)
    device.initialize_distributed()
    layout = LearnerConfig(
        tensor_parallel_size=sizes[0],
        data_parallel_size=sizes[1],
        tokens_per_micro_batch=PROMPT + MAX_RESPONSE,
    )
    with megatron_runtime():
        parallel_state.initialize_model_parallel(sizes[0], create_gloo_process_groups=False)
    batch, rows = TrainBatch.empty(), None
    if rank == 0:
        batch = make_batch(arguments.sequences)
        rows = pad(batch)
    ways: dict[str, Callable[[], Any]] = {
        "ragged": lambda: send_ragged(batch, layout),
        "padded": lambda: send_padded(rows),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, int] = {}
    for turn in range(arguments.rounds + 1):
        for way in list(ways) if turn % 2 else list(ways)[::-1]:
            dist.barrier()
            written, start = _written_bytes(), time.perf_counter()
            ways[way]()
            sent[way] = _written_bytes() - written
            dist.barrier()
            if turn:  # the first is a warm-up
                seconds[way].append(time.perf_counter() - start)
    if rank == 0:
        name = f"{ranks} (TP{sizes[0]} DP{sizes[1]})"
        for way, measured in seconds.items():
            print(
                f"{name:12} {way:6} {sent[way] / MIB:16.1f}    {median(measured):.2f} "
                f"[{min(measured):.2f}, {max(measured):.2f}]"
            )
        ratios = [old / new for new, old in zip(*seconds.values(), strict=True)]
        print(
            f"{name:12} ratio  {sent['padded'] / sent['ragged']:16.1f}    {median(ratios):.1f} "
            f"[{min(ratios):.1f}, {max(ratios):.1f}]",
            flush=True,
        )
    dist.destroy_process_group()


def _written_bytes() -> int:
    """Return the bytes that this process has written so far, to sockets above all."""
    lines = Path("/proc/self/io").read_text().splitlines()
    (written,) = (line.split()[1] for line in lines if line.startswith("wchar:"))
    return int(written)


if __name__ == "__main__":
    main()
