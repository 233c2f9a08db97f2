"""What a publish costs the host beside the data: `python benchmarks/host_cost.py`.

A model of 64 layers of tiny tensors, so that only the host's own work is left: Python, the calls of
torch, and waiting for a device. Three steps are timed, all in INT8 on one core of this machine:

- "convert": one pass of the converter on one learner rank, without sending.
- "load": a server's process writes a key frame into its model.
- "verify": a server's process computes the checksums of what it holds.
- "write": the converter writes into that model (`quantization.transport=direct`).

Beside the milliseconds it prints how many operations torch was asked for, and how often the host
read a value of a tensor, for which it would wait for a GPU. "load" has a reference: SGLang's own
loader. Each round is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LAYERS = 64
DIMENSIONS: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BUCKET_BYTES = 2**29
STEPS = ("convert", "load", "SGLang's load", "verify", "write")


def measure(passes: int) -> dict[str, dict[str, float]]:
    """Return milliseconds, operations and reads of each step."""
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    import sglang_loader
    from operations import HostReads
    from qurl_megatron import device
    from qurl_megatron.learner.cpu_runtime import megatron_runtime
    from qurl_megatron.model.architecture import Architecture
    from qurl_megatron.sglang_plugin.receive import write_bucket
    from qurl_megatron.weight_sync.direct import ServerParameters
    from qurl_megatron.weight_sync.reshard import Converter
    from test_direct import hand_out
    from tiny import build_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        model_dir = build_tiny_model(Path(directory), "qwen2", tied=True, **DIMENSIONS)
        steps: dict[str, Callable[[], Any]] = {}
        with sglang_loader.engine(model_dir):
            with megatron_runtime():
                parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            model = sglang_loader.build(model_dir, "int8")
            shards: Any = Shards(Architecture.from_directory(model_dir), device.device())
            converter = Converter(shards, "int8", BUCKET_BYTES)
            sent: list[Any] = []
            converter.convert(sent.append)
            steps["convert"] = lambda: converter.convert(lambda bucket: None)
            steps["verify"] = lambda: sglang_loader.checksums_of([model])
            steps["SGLang's load"] = lambda: [
                model.load_weights(list(bucket.tensors())) for bucket in sent
            ]
            parameters = ServerParameters()
            parameters.attach({"server": hand_out([model])})
            parameters.keep(["server"], ["server"])

            def load() -> None:
                for bucket in sent:
                    write_bucket(model, bucket)

            steps["load"] = load
            steps["write"] = lambda: converter.write(parameters)
            results: dict[str, dict[str, float]] = {}
            for name, step in steps.items():
                step()
                times = []
                for _ in range(passes):
                    start = time.process_time()
                    step()
                    times.append(time.process_time() - start)
                with HostReads() as counted:
                    step()
                results[name] = {
                    "ms": median(times) * 1000,
                    "operations": counted.counts.total(),
                    "reads": counted.number,
                }
            parallel_state.destroy_model_parallel()
            return results


class Shards:
    """The shards that a learner of one rank would have, without its optimizer."""

    def __init__(self, architecture: Any, place: Any, layers: int = LAYERS) -> None:
        import torch

        from qurl_megatron.model import weight_map

        self.architecture = architecture
        generator = torch.Generator().manual_seed(0)
        self._shards = []
        for rule in weight_map.rules(architecture):
            parts = [
                torch.randn(weight_map.full_shape(part, architecture), generator=generator) * 0.02
                for part in rule.tensors
            ]
            for layer in range(layers) if rule.layered else [None]:
                shard = weight_map.merge(rule, parts, architecture, 1).bfloat16().to(place)
                self._shards.append((rule, layer, shard))

    def shards(self, *, of_experts: bool | None = None) -> Any:
        """Yield what `Learner.shards` yields."""
        for rule, layer, shard in self._shards:
            if of_experts is None or rule.of_experts == of_experts:
                yield rule, layer, shard


def run_child(passes: int) -> dict[str, dict[str, float]]:
    """Measure in a process of its own."""
    path = os.pathsep.join(str(part) for part in (REPOSITORY, REPOSITORY / "tests"))
    words = [sys.executable, __file__, "--child", str(passes)]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child)))
        return
    print(f"{os.cpu_count()} cores, {platform.machine()}, medians of CPU milliseconds")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core")))
    rounds = [run_child(arguments.passes) for _ in range(arguments.rounds)]
    print(f"{'step':16}{'ms':>24}{'operations':>12}{'reads':>12}")
    for step in STEPS:
        times = [result[step]["ms"] for result in rounds]
        spread = f"{median(times):.1f} [{min(times):.1f}, {max(times):.1f}]"
        last = rounds[-1][step]
        print(f"{step:16}{spread:>24}{last['operations']:12.0f}{last['reads']:12.0f}")


if __name__ == "__main__":
    main()
