"""What it costs that learner and servers take turns: `python -m benchmarks.sharing --what cycle`.

    cycle   the learner leaves and comes back, as the model grows

Learners of one width in BF16, with more and more layers, take an optimizer step. Then each leaves
and comes back a few times. For each size it prints the bytes that wait in the host's memory and
those of the gradients, which are dropped; as medians over cycles with [least, most], the seconds of
leaving and of coming back until the device has everything; and the memory that the process holds
before, while and after it is away: resident memory, or on a GPU what torch has allocated there. The
first cycle maps the host's memory, and is printed apart. Slopes are those of straight lines through
the logarithms of all later cycles over the bytes that wait, with their standard errors: 1 is
proportional.
"""

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.growth import make_batch, slope, train
from benchmarks.machine import MIB
from qurl_megatron import device
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.process import trim_heap
from qurl_megatron.recipes import quickstart

DIMENSIONS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


class Cycle(NamedTuple):
    """How a learner left and came back."""

    leave_s: float
    return_s: float
    before_bytes: int  # that the process holds
    away_bytes: int
    after_bytes: int


class Cycles(NamedTuple):
    """All cycles of a learner."""

    waiting_bytes: int  # weights, masters and moments
    gradient_bytes: int
    cycles: list[Cycle]


def measure(model: Path, number: int) -> Cycles:
    """Take a step, and then leave and come back so many times, after a first time."""
    learner = Learner(model, LearnerConfig(), OptimizerConfig(learning_rate=1e-4))
    train(learner, make_batch(2))
    trim_heap()
    cycles = []
    for _ in range(1 + number):
        before, start = machine.held_bytes(), time.perf_counter()
        learner.leave()
        left, away = time.perf_counter(), machine.held_bytes()
        began = time.perf_counter()
        learner.come_back()
        if device.accelerator() == "cuda":
            torch.cuda.synchronize()
        came_back = time.perf_counter()
        for chunk in learner.chunks:
            chunk.zero_grad_buffer()  # as the next update does
        after = machine.held_bytes()
        cycles.append(Cycle(left - start, came_back - began, before, away, after))
    buffers = [buffer for chunk in learner.chunks for buffer in chunk.buffers]
    weights = sum(buffer.param_data.nbytes for buffer in buffers)
    optimizer = sum(tensor.nbytes for tensor in learner._optimizer_shards.own_storages())
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    learner.close()
    return Cycles(weights + optimizer, gradients, cycles)


def print_cycles(layers: list[int], number: int) -> None:
    """Print what the cycles of each size cost, and the slopes."""
    print(
        f"{'layers':>8} {'waits MiB':>10} {'gradients':>10} {'leave s':>20} {'return s':>20} "
        f"{'before':>8} {'away':>8} {'after MiB':>10} {'first time s':>14}"
    )
    by_size = []
    with tempfile.TemporaryDirectory() as scratch:
        for each in layers:
            model = Path(scratch) / str(each)
            quickstart.build_model(model, seed=0, num_hidden_layers=each, **DIMENSIONS)
            found: Cycles = machine.run_ranks(measure, 1, model, number)
            by_size.append(found)
            first, *later = found.cycles
            last = later[-1]
            print(
                f"{each:8} {found.waiting_bytes / MIB:10.0f} {found.gradient_bytes / MIB:10.0f} "
                f"{machine.spread([cycle.leave_s for cycle in later]):>20} "
                f"{machine.spread([cycle.return_s for cycle in later]):>20} "
                f"{last.before_bytes / MIB:8.0f} {last.away_bytes / MIB:8.0f} "
                f"{last.after_bytes / MIB:10.0f} {first.leave_s:7.2f}, {first.return_s:.2f}",
                flush=True,
            )
    if len(by_size) > 1:
        of = [(found.waiting_bytes, cycle) for found in by_size for cycle in found.cycles[1:]]
        leaving = slope([(size, cycle.leave_s) for size, cycle in of])
        returning = slope([(size, cycle.return_s) for size, cycle in of])
        print(f"{'slope':>8} {'':>10} {'':>10} {leaving:>20} {returning:>20}")


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--what", choices=["cycle"], required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cycles", type=int, default=9, help="of each size, after a first one")
    arguments = parser.parse_args()
    machine.print_machine("torch", "megatron-core")
    print_cycles(arguments.layers, arguments.cycles)


if __name__ == "__main__":
    main()
