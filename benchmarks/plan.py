"""Measure the errors of `qurl plan`'s times: `python -m benchmarks.plan`.

1. Decode constants of `planning/step_time.py`, fitted again to the latencies they come from.
2. Published times and ratios that no constant was fitted to, with their sources. Settings that a
   source leaves out are stated beside the figure.

`tests/test_memory.py` compares the planned memory with what real learners allocate.
"""

from unittest.mock import patch

import numpy as np
from scipy.optimize import least_squares

from benchmarks import machine
from qurl_megatron.config.schema import Config, WeightFormat
from qurl_megatron.config.text import with_overrides
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.planning import memory, step_time
from qurl_megatron.planning.gpus import H100
from qurl_megatron.planning.lengths import Workload
from qurl_megatron.planning.rollout_time import rollout_s, server_load
from qurl_megatron.planning.step_time import plan_publish
from qurl_megatron.recipes.scaling_32b import study

# (format, mean context in tokens, {sequences: median inter-token latency in ms}) of Qwen3-8B on one
# H100 with vLLM 0.30. Source: github.com/tgarg01/silybench-data, derived/csv/perf_points.csv at
# 93e4887, decode-128-1024, balanced-2048-2048 and longctx-8192-512. The mean context is the prompt
# and half of the output. With more sequences than these, not all of them ran at once.
FITTED: list[tuple[WeightFormat, int, dict[int, float]]] = [
    ("bf16", 640, {1: 6.858, 4: 7.009, 16: 7.530, 32: 8.110, 64: 9.494, 128: 12.004, 256: 18.084}),
    ("fp8", 640, {1: 4.662, 4: 4.815, 16: 5.251, 32: 6.032, 64: 7.260, 128: 10.159, 256: 16.129}),
    ("fp8", 3072, {1: 4.796, 4: 5.319, 16: 7.217, 32: 9.811, 48: 12.252}),
    ("bf16", 8448, {1: 7.301, 4: 8.617, 7: 10.182, 10: 11.779}),
    ("fp8", 8448, {1: 5.104, 4: 6.425, 10: 9.506}),
]

# (model, GPUs, task, mean output tokens, {sequences: median inter-token latency in ms}) on H100 in
# BF16 with vLLM. Source: github.com/ml-energy/leaderboard at 0cd52da, public/data/tasks. It does
# not state the context, for which the mean output is assumed; that is too much when memory is full.
# In the chat task new prompts are read between the tokens, which the plan leaves out.
LATENCIES: list[tuple[str, int, str, int, dict[int, float]]] = [
    ("Qwen3-32B", 2, "gpqa", 7000, {8: 16.72, 16: 19.32, 32: 25.27, 64: 32.28}),
    ("Qwen3-14B", 1, "gpqa", 7000, {8: 14.42, 16: 17.34, 32: 21.55, 59: 28.07}),
    ("Qwen3-32B", 1, "chat", 630, {8: 25.21, 16: 26.35, 29: 28.81}),
    ("Qwen3-32B", 2, "chat", 630, {8: 15.06, 32: 17.91, 64: 22.45, 128: 29.66, 256: 44.45}),
    ("Llama-3.1-70B", 4, "chat", 350, {32: 20.05, 64: 22.43, 128: 27.87, 256: 39.84}),
]


def print_row(label: str, planned: float, measured: float, unit: str) -> None:
    """Print a planned value beside a measured or published one, with the plan's error."""
    error = planned / measured - 1
    print(f"   {label:58} {planned:9.2f} {measured:9.2f} {unit:5} {error:+7.1%}", flush=True)


def latency_errors(constants: np.ndarray) -> list[float]:
    """Return the relative errors of the latencies in `FITTED` with these decode constants."""
    weights, kv, layer_s, sequence_s, bf16, eight_bit = constants
    errors = []
    with patch.multiple(
        step_time,
        HBM_EFFICIENCY={"weights": weights, "kv": kv},
        LAYER_S=layer_s,
        SEQUENCE_S=sequence_s,
        PRODUCT_EFFICIENCY={"bf16": bf16, "8-bit": eight_bit},
    ):
        for weight_format, context, latencies in FITTED:
            for sequences, latency_ms in latencies.items():
                tokens = sequences * context
                time_s = step_time.decode_s(
                    KNOWN_MODELS["Qwen3-8B"], weight_format, 1, sequences, tokens
                )
                errors.append(1000 * time_s / latency_ms - 1)
    return errors


def refit_constants() -> None:
    """Fit the constants to `FITTED` by least squares of the relative error, and print them."""
    constants = {
        "HBM_EFFICIENCY of weights": step_time.HBM_EFFICIENCY["weights"],
        "HBM_EFFICIENCY of kv": step_time.HBM_EFFICIENCY["kv"],
        "LAYER_S": step_time.LAYER_S,
        "SEQUENCE_S": step_time.SEQUENCE_S,
        "PRODUCT_EFFICIENCY of bf16": step_time.PRODUCT_EFFICIENCY["bf16"],
        "PRODUCT_EFFICIENCY of 8-bit": step_time.PRODUCT_EFFICIENCY["8-bit"],
    }
    scale = np.array(list(constants.values()))
    factors = least_squares(lambda x: latency_errors(x * scale), np.ones(6), bounds=(0.1, 10)).x
    print("1. Decode constants: in step_time.py, and fitted to Qwen3-8B on one H100 (silybench)\n")
    for (name, value), fitted in zip(constants.items(), factors * scale, strict=True):
        print(f"   {name:58} {value:9.3g} {fitted:9.3g}")
    own = np.array(latency_errors(scale))
    print(
        f"   {len(own)} latencies: root mean square error {np.sqrt(np.mean(own**2)):.1%}, "
        f"largest {np.abs(own).max():.1%}\n"
    )


def compare_published() -> None:
    """Print planned times and ratios beside published ones that no constant was fitted to."""
    print("2. Published figures: planned, published, error\n")
    print("   Latency of a token, ML.ENERGY leaderboard (Feb 2026), H100, BF16")
    for name, gpus, task, context, latencies in LATENCIES:
        architecture = KNOWN_MODELS[name]
        for sequences, latency_ms in latencies.items():
            planned = step_time.decode_s(architecture, "bf16", gpus, sequences, sequences * context)
            label = f"{name}, {gpus} GPUs, {task}, {sequences} sequences"
            print_row(label, 1000 * planned, latency_ms, "ms")
    print("\n   8-bit over BF16 in throughput")
    print("   QuRL paper, Figure 8, INT8 on H100 (lengths not stated; 512 + 1024 tokens assumed)")
    ratio = throughput_ratio(KNOWN_MODELS["Qwen2.5-7B"], 1, 512, 1024, "int8")
    print_row("7B, 1 GPU (+20 to 30 %)", ratio, 1.25, "x")
    ratio = throughput_ratio(KNOWN_MODELS["Qwen2.5-32B"], 2, 512, 1024, "int8")
    print_row("32B, 2 GPUs (+90 %)", ratio, 1.9, "x")
    print("   GPUStack performance lab, Qwen3-32B, ShareGPT, TensorRT-LLM: 1926 / 1280 tokens/s")
    ratio = throughput_ratio(KNOWN_MODELS["Qwen3-32B"], 1, 217, 201, "fp8", 0.9)
    print_row("FP8, 1 GPU", ratio, 1926 / 1280, "x")
    print("\n   Step of GRPO, NeMo-RL v0.4 performance summary, H100, BF16, on policy, colocated")
    print("   (2048 sequences, 4 minibatches, a reference; prompts of 150 tokens assumed)")
    step_s = colocated_step_s(KNOWN_MODELS["Qwen3-32B"], 32, 4, (4, 4, 2), 3206)
    print_row("Qwen3-32B, 32 GPUs, TP4, learner TP4 x PP4 x DP2", step_s, 393.0, "s")
    step_s = colocated_step_s(KNOWN_MODELS["Llama-3.1-8B"], 16, 1, (1, 2, 8), 1060)
    print_row("Llama 3.1 8B, 16 GPUs, TP1, learner PP2 x DP8", step_s, 97.7, "s")
    print("\n   Weight update, dense 32B in BF16, 2 + 2 nodes over NCCL, verl (plan: lower bound)")
    words = ["learner.pipeline_parallel_size=2", "learner.layers_in_last_pipeline_stage=none",
             "rollout.servers=2"]  # fmt: skip
    config = with_overrides(study("", 64, "bf16"), words)
    print_row("TP8 x PP2", plan_publish(KNOWN_MODELS["Qwen2.5-32B"], config).time_s, 14.2, "s")


def throughput_ratio(
    architecture: Architecture,
    gpus: int,
    prompt: int,
    output: int,
    weight_format: WeightFormat,
    fraction: float = 0.85,
) -> float:
    """Return the throughput of a full server over that in BF16, with the time to read prompts."""

    def tokens_per_s(weight_format: WeightFormat) -> float:
        weights = sum(memory.server_weight_bytes(architecture, weight_format, gpus).values())
        room = H100.memory_bytes * fraction - weights
        fits = room / memory.kv_bytes_per_token(architecture, gpus) / (prompt + output / 2)
        sequences = min(256.0, fits)
        step_s = step_time.decode_s(
            architecture, weight_format, gpus, sequences, sequences * (prompt + output / 2)
        )
        prompts_s = step_time.prefill_s(architecture, weight_format, gpus, sequences * prompt)
        return sequences * output / (output * step_s + prompts_s)

    return tokens_per_s(weight_format) / tokens_per_s("bf16")


def colocated_step_s(
    architecture: Architecture,
    gpus: int,
    server_gpus: int,
    sizes: tuple[int, int, int],
    mean_length: int,
) -> float:
    """Return the time of a step if servers and learner take turns on all GPUs.

    The step has 64 prompts x 32 responses of up to 4096 tokens with the prompt.
    """
    workload = Workload(150, mean_length - 150)
    words = [
        f"learner.{name}_parallel_size={size}"
        for name, size in zip(("tensor", "pipeline", "data"), sizes, strict=True)
    ]
    words += ["learner.micro_batch_size=1", "rollout.prompts_per_step=64",
              "rollout.completions_per_prompt=32", "optimizer.minibatches_per_step=4",
              "objective.kl_coefficient=0.01", "quantization.format=bf16",
              f"rollout.max_response_length={4096 - 150}", f"rollout.servers={gpus // server_gpus}",
              f"rollout.server.tensor_parallel_size={server_gpus}"]  # fmt: skip
    config = with_overrides(Config(), words)
    load = server_load(architecture, config, workload, slots=256, publish_s=0.0)
    return rollout_s(load) + sum(step_time.learner_s(architecture, config, workload).values())


def main() -> None:
    machine.parser(__doc__).parse_args()
    refit_constants()
    compare_published()


if __name__ == "__main__":
    main()
