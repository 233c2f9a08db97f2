"""What a delta publish sends and costs: `python -m benchmarks.delta`.

Weights have the widths of Qwen2.5-32B: rows of 5120 values (q, k, v, o, gate, up) and of 27648
(down), drawn from Student's t with 6 degrees of freedom, sigma 0.02 / s, as UAQ with scale s leaves
them. Float32 masters lie anywhere between BF16 values, as late in a run. Adam moves them with the
learning rate 1e-6; its moments begin in their stationary state, for gradients whose mean is a tenth
of their deviation. A publish comes after 1, 4 or 16 optimizer steps.

1. Per publish and format: the part of codes and of scales that changed, the bytes of the delta per
   parameter, and the CPU time per 10^9 parameters to compare and pack it, and to write it into the
   server's parameters. Then the bytes of the compressed delta, as servers behind slow links get it,
   and the CPU time to compress and to decompress it, for tensors of real size: the changes
   repeated, each time in another order. Each delta, relative or not, is written into a copy, which
   must then be the new tensor.
2. A publish of Qwen2.5-32B, whose norm-fed layers have s = 1.5 and all others s = 1: seconds that
   its bytes take over links of 0.1 to 400 Gb/s, for deltas, compressed and not, and for all
   tensors. On one core, compression takes time too: the megabits per second below which it pays are
   given. Every row of the embedding counts as moving. Rows of tokens that a batch lacks do not
   move, so a run sends less.

With `--run RUN_DIR` it prints instead what each publish of a real run sent to a server, from the
run's metrics.jsonl, beside what all tensors would have taken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.model import weight_map
from qurl_megatron.planning import memory
from qurl_megatron.quantization import quantize
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES
from qurl_megatron.weight_sync.delta import Change, compare, pack, unpack

T = TypeVar("T")
# By format, optimizer steps, width and UAQ scale.
Sizes = dict[tuple[WeightFormat, int, int, float], "Measured"]

MODEL = ARCHITECTURES["Qwen2.5-32B"]
WIDTHS = (MODEL.hidden_size, MODEL.intermediate_size)
FORMATS: tuple[WeightFormat, ...] = ("int8", "fp8", "fp8-block", "bf16")
MINIBATCHES = (1, 4, 16)
UAQ_SCALES = (1.0, 1.5)
GIGABITS = (0.1, 1, 10, 100, 400)
LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-6, 0.9, 0.999, 1e-8
GRADIENT_SIZE, SIGNAL = 5e-7, 0.1
CHANGES = 300_000  # that are compressed at once
CPU = torch.device("cpu")


class Weight:
    """A float32 master that Adam moves."""

    def __init__(self, rows: int, columns: int, uaq_scale: float) -> None:
        torch.manual_seed(0)
        shape = (rows, columns)
        student = torch.distributions.StudentT(6.0).sample(shape) * (4 / 6) ** 0.5
        self.master = student * (0.02 / uaq_scale)
        self._size = GRADIENT_SIZE * torch.randn(shape).exp_()
        self._mean = SIGNAL * self._size * torch.randn(shape).sign_()
        deviation = ((1 - BETA1) / (1 + BETA1)) ** 0.5
        self._first = self._mean + deviation * self._size * torch.randn(shape)
        self._second = self._size.square() * (1 + SIGNAL**2)

    def step(self) -> None:
        """Take one optimizer step."""
        gradient = self._mean + self._size * torch.randn(self._size.shape)
        self._first.lerp_(gradient, 1 - BETA1)
        self._second.lerp_(gradient.square_(), 1 - BETA2)
        self.master -= LEARNING_RATE * self._first / (self._second.sqrt() + EPSILON)

    def sent(self, weight_format: WeightFormat) -> dict[str, Tensor]:
        """Return the tensors that a BF16 learner sends for it."""
        weight = self.master.bfloat16()
        if weight_format == "bf16":
            return {"codes": weight}
        quantized = quantize.quantize(weight, weight_format)
        return {"codes": quantized.codes, "scales": quantize.engine_scale(quantized)}


@dataclass
class Measured:
    """A publish of one weight."""

    codes_changed: float  # part of them
    scales_changed: float
    bytes_per_parameter: float
    pack_s: float  # CPU time per parameter
    write_s: float
    compressed_bytes_per_parameter: float
    compress_s: float
    decompress_s: float


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result and the CPU time of a call."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def measure(old: dict[str, Tensor], new: dict[str, Tensor]) -> Measured:
    """Send what changed, and check that it turns the old tensors into the new ones."""

    def send() -> tuple[list[Change], Tensor]:
        changes = [compare(name, (0, 0), old[name], new[name]) for name in new]
        found = [change for change in changes if change is not None]
        return found, pack(found, CPU)

    def write(changes: Iterable[Change]) -> None:
        held = {name: tensor.clone() for name, tensor in old.items()}
        begin = time.process_time()
        for change in changes:
            change.write_to(held[change.name], 0, 0)
        spent_s.append(time.process_time() - begin)
        for name, tensor in new.items():
            assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name

    spent_s: list[float] = []
    (changes, flat), pack_s = timed(send)
    write(unpack(flat))
    compared = [compare(name, (0, 0), old[name], new[name], is_relative=True) for name in new]
    told = [change for change in compared if change is not None]
    write(unpack(pack(told, CPU)))
    times = -(-CHANGES // sum(len(change.values) for change in told)) if told else 1
    message = pack([repeated(change, times) for change in told], CPU).numpy().tobytes()
    compressed, compress_s = timed(lambda: zlib.compress(message, level=1))
    _, decompress_s = timed(lambda: zlib.decompress(compressed))
    changed = {
        name: int(quantize.code_flips(old[name], new[name])) / new[name].numel() for name in new
    }
    parameters = new["codes"].numel()
    return Measured(
        changed["codes"],
        changed.get("scales", 0.0),
        sum(change.num_bytes for change in changes) / parameters,
        pack_s / parameters,
        spent_s[0] / parameters,
        len(compressed) / parameters / times,
        compress_s / parameters / times,
        decompress_s / parameters / times,
    )


def repeated(change: Change, times: int) -> Change:
    """Return a change like this one of a tensor that has so many times its rows."""
    rows, columns = change.shape

    def shuffled(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[torch.randperm(len(tensor))] for _ in range(times)])

    gaps = None if change.gaps is None else shuffled(change.gaps)
    shape = rows * times, columns
    return Change(change.name, (0, 0), shape, gaps, shuffled(change.values), change.is_relative)


def publishes(
    weight: Weight, minibatches: int, repetitions: int
) -> dict[WeightFormat, list[Measured]]:
    """Return several publishes in all formats, one after another."""
    measured: dict[WeightFormat, list[Measured]] = {name: [] for name in FORMATS}
    last = {name: weight.sent(name) for name in FORMATS}
    for _ in range(repetitions):
        for _ in range(minibatches):
            weight.step()
        for name in FORMATS:
            new = weight.sent(name)
            measured[name].append(measure(last[name], new))
            last[name] = new
    return measured


def print_publishes(rows: int, repetitions: int) -> Sizes:
    """Print section 1; return the medians."""
    print(f"1. Deltas of {rows} rows; medians of {repetitions} publishes\n")
    print(
        "width    s    minibatches  format     codes %  scales %  bytes per     "
        "compare, pack   write         compressed     compress     decompress\n"
        "                                      changed  changed   parameter     "
        "s per 10^9      s per 10^9    per parameter  s per 10^9   s per 10^9"
    )
    sizes: Sizes = {}
    for width in WIDTHS:
        for uaq_scale in UAQ_SCALES:
            weight = Weight(rows, width, uaq_scale)
            for minibatches in MINIBATCHES:
                for name, results in publishes(weight, minibatches, repetitions).items():
                    medians = Measured(
                        *(
                            median(getattr(result, field) for result in results)
                            for field in Measured.__dataclass_fields__
                        )
                    )
                    sizes[name, minibatches, width, uaq_scale] = medians
                    print(
                        f"{width:5}  {uaq_scale:3}  {minibatches:11}  {name:9}  "
                        f"{100 * medians.codes_changed:7.4f}  "
                        f"{100 * medians.scales_changed:8.3f}  "
                        f"{medians.bytes_per_parameter:.6f}      "
                        f"{1e9 * medians.pack_s:6.2f}          {1e9 * medians.write_s:6.2f}        "
                        f"{medians.compressed_bytes_per_parameter:.6f}       "
                        f"{1e9 * medians.compress_s:6.2f}       {1e9 * medians.decompress_s:6.2f}",
                        flush=True,
                    )
    return sizes


def print_model(sizes: Sizes) -> None:
    """Print section 2."""
    print("\n2. A publish of Qwen2.5-32B: megabytes, and seconds on the link\n")
    header = "".join(f"{f'{gigabits} Gb/s':>11}" for gigabits in GIGABITS)
    print(f"format     sent                                  megabytes{header}")
    for name in FORMATS:
        rows = [("all tensors", float(memory.published_bytes(MODEL, name)))]
        notes = []
        for minibatches in MINIBATCHES:
            total = delta_total(sizes, name, minibatches)
            what = f"delta of {minibatches} optimizer steps"
            rows.append((what, total.bytes_per_parameter))
            rows.append((f"{what}, compressed", total.compressed_bytes_per_parameter))
            spared = total.bytes_per_parameter - total.compressed_bytes_per_parameter
            spent_s = total.compress_s + total.decompress_s
            notes.append(f"{8e-6 * spared / spent_s:.0f} ({spent_s:.2f} s)")
        for what, num_bytes in rows:
            seconds = "".join(f"{8e-9 * num_bytes / gigabits:11.4f}" for gigabits in GIGABITS)
            print(f"{name:9}  {what:36}  {num_bytes / 1e6:9.0f}{seconds}")
        print(f"{name:9}  compressing pays below Mb/s (seconds it takes): {', '.join(notes)}")


def delta_total(sizes: Sizes, weight_format: WeightFormat, minibatches: int) -> Measured:
    """Return the bytes and the seconds of a delta of the whole model."""
    total = Measured(*[0.0] * len(Measured.__dataclass_fields__))
    for rule in weight_map.rules(MODEL):
        sent_format: WeightFormat = weight_format if rule.quantized else "bf16"
        uaq_scale = UAQ_SCALES[1] if rule.norm_fed else UAQ_SCALES[0]
        for tensor in rule.tensors:
            shape = weight_map.full_shape(tensor, MODEL)
            width = shape[1] if len(shape) == 2 else WIDTHS[0]
            part = sizes[sent_format, minibatches, width, uaq_scale]
            parameters = math.prod(shape) * (MODEL.num_layers if rule.layered else 1)
            for field in Measured.__dataclass_fields__:
                more = parameters * getattr(part, field)
                setattr(total, field, getattr(total, field) + more)
    return total


def print_run(run_dir: Path) -> None:
    """Print what each publish of a run sent, beside what all tensors take."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    print(f"{run_dir}: bytes of each publish, of all tensors\n")
    for step in steps:
        sent, full = step["publish_bytes"], step["publish_full_bytes"]
        print(
            f"step {step['step']:4}: {sent:12,} of {full:,} ({sent / full:.4f}), codes changed "
            f"{step['code_flip_fraction']:.5f}, {step['time_publish_s']:.3f} s"
        )
    parts = [step["publish_bytes"] / step["publish_full_bytes"] for step in steps]
    sent = sum(step["publish_bytes"] for step in steps)
    full = sum(step["publish_full_bytes"] for step in steps)
    print(
        f"\n{len(steps)} publishes: {median(parts):.4f} of all tensors [{min(parts):.4f}, "
        f"{max(parts):.4f}]; {sent:,} bytes in all, where all tensors are {full:,} "
        f"({sent / full:.4f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--run", type=Path, help="directory of a run")
    arguments = parser.parse_args()
    if arguments.run:
        print_run(arguments.run)
        return
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, {platform.machine()}, one thread, torch {version('torch')}\n")
    print_model(print_publishes(arguments.rows, arguments.repetitions))


if __name__ == "__main__":
    main()
