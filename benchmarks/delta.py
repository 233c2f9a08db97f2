"""What a delta publish sends and costs: `python -m benchmarks.delta`.

Weights have the widths of Qwen2.5-32B: rows of 5120 values (q, k, v, o, gate, up) and of 27648
(down), drawn from Student's t with 6 degrees of freedom, sigma 0.02 / s, as UAQ with scale s leaves
them. Float32 masters lie anywhere between BF16 values, as late in a run. Adam moves them with the
learning rate 1e-6; its moments begin in their stationary state, for gradients whose mean is a tenth
of their deviation. A publish comes after 1, 4 or 16 optimizer steps.

1. Per publish and format: the part of codes that changed, the bytes of the delta per parameter, and
   the CPU time per 10^9 parameters to compare and pack it, and to write it into the server's
   parameters. Each delta is written into a copy, which must then be the new tensor.
2. A publish of Qwen2.5-32B, whose norm-fed layers have s = 1.5 and all others s = 1: seconds that
   its bytes take over links of 0.1 to 400 Gb/s, for deltas and for all tensors. Every row of the
   embedding counts as moving. Rows of tokens that a batch lacks do not move, so a run sends less.
"""

import math
import time
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import machine
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.model import weight_map
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.planning import memory
from qurl_megatron.quantization import quantize
from qurl_megatron.weight_sync.delta import compare, pack, unpack

# By format, optimizer steps, width and UAQ scale.
Sizes = dict[tuple[WeightFormat, int, int, float], "Measured"]

MODEL = KNOWN_MODELS["Qwen2.5-32B"]
WIDTHS = (MODEL.hidden_size, MODEL.intermediate_size)
FORMATS: tuple[WeightFormat, ...] = ("int8", "fp8", "fp8-block", "bf16")
MINIBATCHES = (1, 4, 16)
UAQ_SCALES = (1.0, 1.5)
GIGABITS = (0.1, 1, 10, 100, 400)
LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-6, 0.9, 0.999, 1e-8
GRADIENT_SIZE, SIGNAL = 5e-7, 0.1


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


class Measured(NamedTuple):
    """A publish of one weight."""

    codes_changed: float  # part of them
    bytes_per_parameter: float
    pack_s: float  # CPU time per parameter
    write_s: float


def measure(old: dict[str, Tensor], new: dict[str, Tensor]) -> Measured:
    """Send what changed, and check that it turns the old tensors into the new ones."""
    start = time.process_time()
    found = [compare(name, (0, 0), old[name], new[name]) for name in new]
    changes = [change for change in found if change is not None]
    flat = pack(changes, torch.device("cpu"))
    pack_s = time.process_time() - start
    held = {name: tensor.clone() for name, tensor in old.items()}
    start = time.process_time()
    for change in unpack(flat):
        change.write_to(held[change.name], 0, 0)
    write_s = time.process_time() - start
    for name, tensor in new.items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name
    parameters = new["codes"].numel()
    return Measured(
        int(quantize.code_flips(old["codes"], new["codes"])) / parameters,
        sum(change.num_bytes for change in changes) / parameters,
        pack_s / parameters,
        write_s / parameters,
    )


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
        "width    s    minibatches  format     codes %  bytes per     compare, pack   write\n"
        "                                      changed  parameter     s per 10^9      s per 10^9"
    )
    sizes: Sizes = {}
    for width in WIDTHS:
        for uaq_scale in UAQ_SCALES:
            weight = Weight(rows, width, uaq_scale)
            for minibatches in MINIBATCHES:
                for name, results in publishes(weight, minibatches, repetitions).items():
                    medians = Measured(*map(median, zip(*results, strict=True)))
                    sizes[name, minibatches, width, uaq_scale] = medians
                    print(
                        f"{width:5}  {uaq_scale:3}  {minibatches:11}  {name:9}  "
                        f"{100 * medians.codes_changed:7.4f}  "
                        f"{medians.bytes_per_parameter:.6f}      "
                        f"{1e9 * medians.pack_s:6.2f}          {1e9 * medians.write_s:6.2f}",
                        flush=True,
                    )
    return sizes


def print_model(sizes: Sizes) -> None:
    """Print section 2."""
    print("\n2. A publish of Qwen2.5-32B: megabytes, and seconds on the link\n")
    header = "".join(f"{f'{gigabits} Gb/s':>11}" for gigabits in GIGABITS)
    print(f"format     sent                             megabytes{header}")
    for name in FORMATS:
        rows = [("all tensors", float(memory.published_bytes(MODEL, name)))]
        for minibatches in MINIBATCHES:
            of_delta = delta_bytes(sizes, name, minibatches)
            rows.append((f"delta of {minibatches} optimizer steps", of_delta))
        for what, num_bytes in rows:
            seconds = "".join(f"{8e-9 * num_bytes / gigabits:11.4f}" for gigabits in GIGABITS)
            print(f"{name:9}  {what:31}  {num_bytes / 1e6:9.0f}{seconds}")


def delta_bytes(sizes: Sizes, weight_format: WeightFormat, minibatches: int) -> float:
    """Return the bytes of a delta of the whole model."""
    num_bytes = 0.0
    for rule in weight_map.rules(MODEL):
        sent_format: WeightFormat = weight_format if rule.quantized else "bf16"
        uaq_scale = UAQ_SCALES[1] if rule.fed_by else UAQ_SCALES[0]
        for tensor in rule.tensors:
            shape = weight_map.full_shape(tensor, MODEL)
            width = shape[1] if len(shape) == 2 else WIDTHS[0]
            part = sizes[sent_format, minibatches, width, uaq_scale]
            parameters = math.prod(shape) * (MODEL.num_layers if rule.layered else 1)
            num_bytes += parameters * part.bytes_per_parameter
    return num_bytes


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--rows", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine.print_machine("torch")
    print_model(print_publishes(arguments.rows, arguments.repetitions))


if __name__ == "__main__":
    main()
