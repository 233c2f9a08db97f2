"""Measure the errors of `qurl plan`'s times: `python -m benchmarks.plan`.

It compares them with published times and ratios, and names their sources. No constant of
`planning/step_time.py` was fitted to them, but that of adapters on a server to its only row.
Settings that a source leaves out stand beside the figure.

`tests/test_memory.py` compares the planned memory with what real learners allocate.
"""

import dataclasses
from dataclasses import dataclass

from benchmarks import machine
from qurl_megatron.config.gpus import H100
from qurl_megatron.config.schema import Config, WeightFormat
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.planning import step_time
from qurl_megatron.extensions.planning.lengths import Workload
from qurl_megatron.extensions.planning.rollout_time import rollout_s, server_load, steady_state
from qurl_megatron.extensions.planning.step_time import plan_publish
from qurl_megatron.memory import estimate as memory
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes.scaling_32b import study

# (model, format, GPUs, task, mean output tokens, {sequences: median inter-token latency in ms}) on
# H100 with vLLM. Source: github.com/ml-energy/leaderboard at 0cd52da, public/data/tasks. It does
# not state the context, for which the mean output is assumed; that is too much when memory is full.
# In the chat task new prompts are read between the tokens, which the plan leaves out. Models with
# experts were served with as many expert-parallel ranks as GPUs.
LATENCIES: list[tuple[str, WeightFormat, int, str, int, dict[int, float]]] = [
    ("Qwen3-32B", "bf16", 2, "gpqa", 7000, {8: 16.72, 16: 19.32, 32: 25.27, 64: 32.28}),
    ("Qwen3-14B", "bf16", 1, "gpqa", 7000, {8: 14.42, 16: 17.34, 32: 21.55, 59: 28.07}),
    ("Qwen3-32B", "bf16", 1, "chat", 630, {8: 25.21, 16: 26.35, 29: 28.81}),
    ("Qwen3-32B", "bf16", 2, "chat", 630, {8: 15.06, 32: 17.91, 64: 22.45, 128: 29.66, 256: 44.45}),
    ("Llama-3.1-70B", "bf16", 4, "chat", 350, {32: 20.05, 64: 22.43, 128: 27.87, 256: 39.84}),
    ("Qwen3-30B-A3B", "bf16", 1, "gpqa", 8200, {8: 12.31, 16: 16.75}),
    ("Qwen3-30B-A3B", "bf16", 2, "gpqa", 8100, {8: 9.37, 16: 11.97, 32: 16.40, 64: 21.54}),
    ("Qwen3-235B-A22B", "bf16", 8, "gpqa", 9100, {8: 20.24, 16: 24.88, 32: 33.39}),
    ("Qwen3-235B-A22B", "fp8", 4, "gpqa", 9000, {8: 35.11, 16: 38.23, 32: 43.31}),
    ("Qwen3-235B-A22B", "fp8", 8, "gpqa", 9300, {8: 25.47, 32: 32.20, 64: 39.53, 128: 45.92}),
    ("Qwen3-30B-A3B", "bf16", 2, "chat", 920, {128: 27.42, 256: 34.58, 511: 47.39}),
    ("Qwen3-235B-A22B", "bf16", 8, "chat", 865, {128: 46.64, 228: 55.48}),
    ("Qwen3-235B-A22B", "fp8", 8, "chat", 875, {128: 42.14, 256: 54.93, 511: 75.84}),
]


# Steps of GRPO by NeMo-RL on H100 in BF16, from the tables of its versions 0.4 to 0.7
# (github.com/NVIDIA-NeMo/RL, docs/about/performance-summary.md) and the recipes beside them. On
# policy, servers and learner take turns on all GPUs; one step off, each has half of them. Each
# prompt has 32 completions, and there is a reference policy. Until 0.6 every completion is scored
# before the updates; from 0.7 on none is (force_on_policy_ratio), and there is one minibatch.
# Prompts of 150 tokens are assumed, and lengths as `lengths.Workload` has them. For 0.7 the mean
# length of Qwen3-32B follows from its 665 tokens/s and GPU; the others are those of 0.6.
_PROMPT = 150


@dataclass(frozen=True)
class PublishedStep:
    """One row of a table."""

    version: str
    model: str
    staleness: int  # 0: on policy
    gpus: int
    server_gpus: int  # of one server
    sizes: tuple[int, int, int, int]  # the learner's tensor, context, expert and pipeline sizes
    longest: int  # prompt plus completion, in tokens
    mean_length: int
    prompts: int
    minibatches: int
    published_s: float

    def planned_s(self) -> float:
        """Return the time of the step as it is planned."""
        tensor, context, experts, pipeline = self.sizes
        architecture, on_half = KNOWN_MODELS[self.model], 1 + self.staleness
        data = self.gpus // on_half // (tensor * context * pipeline)
        words = [
            *layout(architecture, tensor, context, experts, pipeline, data),
            f"learner.tokens_per_micro_batch={self.longest}",
            f"rollout.prompts_per_step={self.prompts}",
            "rollout.completions_per_prompt=32",
            f"rollout.max_completion_length={self.longest - _PROMPT}",
            f"rollout.servers={self.gpus // on_half // self.server_gpus}",
            f"rollout.server.tensor_parallel_size={self.server_gpus}",
            f"rollout.max_staleness={self.staleness}",
            f"optimizer.minibatches_per_step={self.minibatches}",
            "objective.kl_coefficient=0.01",
            "quantization.format=bf16",
        ]
        if self.model in ("Llama-3.1-8B", "Qwen3-235B-A22B"):  # as in the recipes
            words.append("learner.recompute=full")
        config = with_overrides(Config(), words)
        workload = Workload(_PROMPT, self.mean_length - _PROMPT)
        publish_s = plan_publish(architecture, config).time_s if self.staleness else 0.0
        load = server_load(architecture, config, workload, 256, publish_s)
        update_s = step_time.learner_time(architecture, config, workload).update
        if self.version < "0.7":  # scored, even if there is one minibatch
            config = with_overrides(config, ["optimizer.minibatches_per_step=2"])
        scoring_s = step_time.learner_time(architecture, config, workload).proximal
        learner_time_s = scoring_s + update_s + publish_s
        if self.staleness:
            return steady_state(load, learner_time_s, self.staleness).step_s
        return rollout_s(load) + learner_time_s


# Version, model, staleness, GPUs, GPUs of a server, sizes, longest, mean length, prompts,
# minibatches, seconds.
STEPS = [
    PublishedStep(*row)
    for row in [
        ("0.4", "Llama-3.1-8B", 0, 16, 1, (1, 1, 1, 2), 4096, 1060, 64, 4, 97.7),
        ("0.5", "Llama-3.1-8B", 0, 16, 1, (1, 1, 1, 2), 4096, 1019, 64, 4, 92.8),
        ("0.4", "Llama-3.1-8B", 1, 16, 1, (1, 1, 1, 2), 4096, 1129, 64, 4, 74.6),
        ("0.5", "Llama-3.1-8B", 1, 16, 1, (1, 1, 1, 1), 4096, 1123, 64, 4, 64.8),
        ("0.4", "Qwen3-32B", 0, 32, 4, (4, 1, 1, 4), 4096, 3206, 64, 4, 393.0),
        ("0.5", "Qwen3-32B", 0, 32, 4, (4, 1, 1, 4), 4096, 3251, 64, 4, 376.0),
        ("0.4", "Qwen3-32B", 1, 64, 4, (4, 1, 1, 4), 4096, 3207, 64, 4, 215.0),
        ("0.5", "Qwen3-32B", 1, 64, 4, (4, 1, 1, 4), 4096, 3252, 64, 4, 200.0),
        ("0.4", "Qwen3-30B-A3B", 0, 32, 4, (2, 1, 8, 1), 4096, 3154, 64, 4, 225.0),
        ("0.5", "Qwen3-30B-A3B", 0, 32, 2, (1, 1, 8, 1), 4096, 3196, 64, 4, 198.0),
        ("0.6", "Qwen3-30B-A3B", 0, 32, 2, (1, 1, 8, 1), 4096, 3203, 64, 4, 192.0),
        ("0.4", "Qwen3-30B-A3B", 1, 32, 2, (1, 1, 8, 2), 4096, 3158, 64, 4, 244.0),
        ("0.5", "Qwen3-30B-A3B", 1, 32, 2, (1, 1, 8, 2), 4096, 3201, 64, 4, 154.0),
        ("0.6", "Qwen3-30B-A3B", 1, 32, 2, (1, 1, 8, 2), 4096, 3201, 64, 4, 152.0),
        ("0.4", "Qwen3-235B-A22B", 0, 128, 16, (2, 2, 16, 8), 8192, 5671, 16, 1, 506.0),
        ("0.5", "Qwen3-235B-A22B", 0, 128, 16, (2, 2, 16, 8), 8192, 5700, 16, 1, 431.0),
        ("0.6", "Qwen3-235B-A22B", 0, 128, 16, (2, 2, 16, 8), 8192, 5698, 16, 1, 395.0),
        ("0.6", "Qwen3-235B-A22B", 0, 256, 16, (2, 2, 16, 8), 8192, 5713, 16, 1, 312.0),
        ("0.4", "Qwen3-235B-A22B", 1, 256, 8, (4, 1, 16, 8), 8192, 5691, 16, 1, 241.0),
        ("0.5", "Qwen3-235B-A22B", 1, 256, 8, (4, 1, 16, 8), 8192, 5707, 16, 1, 203.0),
        ("0.6", "Qwen3-235B-A22B", 1, 256, 8, (4, 1, 16, 8), 8192, 5721, 16, 1, 231.0),
        ("0.7", "Qwen3-32B", 0, 32, 4, (4, 1, 1, 4), 4096, 3356, 64, 1, 323.0),
        ("0.7", "Qwen3-32B", 1, 64, 4, (4, 1, 1, 4), 4096, 3356, 64, 1, 161.0),
        ("0.7", "Qwen3-30B-A3B", 0, 32, 2, (1, 1, 8, 1), 4096, 3203, 64, 1, 171.0),
        ("0.7", "Qwen3-30B-A3B", 1, 32, 2, (1, 1, 8, 2), 4096, 3201, 64, 1, 141.0),
        ("0.7", "Qwen3-235B-A22B", 0, 128, 16, (2, 2, 16, 8), 8192, 5698, 16, 1, 367.0),
        ("0.7", "Qwen3-235B-A22B", 0, 256, 16, (2, 2, 16, 8), 8192, 5713, 16, 1, 285.0),
        ("0.7", "Qwen3-235B-A22B", 1, 256, 8, (4, 1, 16, 8), 8192, 5721, 16, 1, 204.0),
    ]
]


def print_row(label: str, planned: float, measured: float, unit: str) -> None:
    """Print a planned value beside a measured or published one, with the plan's error."""
    error = planned / measured - 1
    print(f"   {label:58} {planned:9.2f} {measured:9.2f} {unit:5} {error:+7.1%}", flush=True)


def layout(architecture: Architecture, *sizes: int) -> list[str]:
    """Return the fields of a learner: tensor, context, expert, pipeline and data parallel sizes."""
    names = ("tensor", "context", "expert", "pipeline", "data")
    words = [
        f"learner.{name}_parallel_size={size}" for name, size in zip(names, sizes, strict=True)
    ]
    pipeline = sizes[names.index("pipeline")]
    if architecture.num_layers % pipeline:
        last = architecture.shorter_last_stage(pipeline)
        words.append(f"learner.layers_in_last_pipeline_stage={last}")
    return words


def pretraining_s(
    name: str, sequences: int, sizes: tuple[int, int, int, int], virtual: int
) -> float:
    """Return the time of an update on sequences of 4096 tokens.

    `sizes` are the learner's tensor, pipeline, data and expert parallel sizes.
    """
    tensor, pipeline, data, experts = sizes
    architecture = KNOWN_MODELS[name]
    words = [
        *layout(architecture, tensor, 1, experts, pipeline, data),
        f"learner.virtual_pipeline_parallel_size={virtual if pipeline > 1 else 1}",
        "learner.micro_batch_size=1",
        f"rollout.prompts_per_step={sequences}",
        "rollout.completions_per_prompt=1",
        "rollout.max_completion_length=4096",
        "optimizer.minibatches_per_step=1",
    ]
    config = with_overrides(Config(), words)
    return step_time.learner_time(architecture, config, Workload(0, 4096)).update


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


def main() -> None:
    machine.parser(__doc__).parse_args()
    print("Planned, published, error\n")
    print("   Latency of a token, ML.ENERGY leaderboard (Feb 2026), H100")
    for name, weight_format, gpus, task, context, latencies in LATENCIES:
        for sequences, latency_ms in latencies.items():
            tokens = sequences * context
            time_s = step_time.decode_s(KNOWN_MODELS[name], weight_format, gpus, sequences, tokens)
            label = f"{name} in {weight_format}, {gpus} GPUs, {task}, {sequences} sequences"
            print_row(label, 1000 * time_s, latency_ms, "ms")
    print("\n   One H100, SGLang 0.5.23 with Triton's attention: docs/findings/systems.md#h100")
    model = KNOWN_MODELS["Qwen2.5-7B"]
    time_s = step_time.decode_s(model, "int8", 1, 64, 64 * 576)
    print_row("Qwen2.5-7B in int8, a token of 64 sequences of 576", 1000 * time_s, 5.29, "ms")
    time_s = step_time.prefill_s(model, "int8", 1, 64 * 512)
    print_row("Qwen2.5-7B in int8, prompts of 64 x 512 tokens", 1000 * time_s, 462.0, "ms")
    with_adapters = dataclasses.replace(model, adapter_rank=16)
    for label, architecture, weight_format, rate in (
        ("bf16", model, "bf16", 6094.0),
        ("int8", model, "int8", 8492.0),
        ("fp8", model, "fp8", 8513.0),
        ("int8 with adapters", with_adapters, "int8", 6921.0),
    ):
        time_s = step_time.prefill_s(architecture, weight_format, 1, 64 * 512)
        time_s += 256 * step_time.decode_s(architecture, weight_format, 1, 64, 64 * 640)
        print_row(f"Qwen2.5-7B in {label}, 64 x 512 + 256 tokens", time_s, 64 * 256 / rate, "s")
    print("\n   8-bit over BF16 in throughput")
    print("   QuRL paper, Figure 8, INT8 on H100 (lengths not stated; 512 + 1024 tokens assumed)")
    ratio = throughput_ratio(KNOWN_MODELS["Qwen2.5-7B"], 1, 512, 1024, "int8")
    print_row("7B, 1 GPU (+20 to 30 %)", ratio, 1.25, "x")
    ratio = throughput_ratio(KNOWN_MODELS["Qwen2.5-32B"], 2, 512, 1024, "int8")
    print_row("32B, 2 GPUs (+90 %)", ratio, 1.9, "x")
    print("   GPUStack performance lab, Qwen3-32B, ShareGPT, TensorRT-LLM: 1926 / 1280 tokens/s")
    ratio = throughput_ratio(KNOWN_MODELS["Qwen3-32B"], 1, 217, 201, "fp8", 0.9)
    print_row("FP8, 1 GPU", ratio, 1926 / 1280, "x")
    print("\n   Pretraining step, H100 in BF16, 4096 tokens, experts chosen equally often")
    print("   Megatron-Bridge pull request 5123: 299 TFLOP/s; expert parallel size not stated, 8")
    step_s = pretraining_s("Qwen3-30B-A3B", 1024, (1, 1, 16, 8), 1)
    print_row("Qwen3-30B-A3B, 16 GPUs", step_s, 20.147, "s")
    print(
        "   Megatron-LM pull request 5728: 302 TFLOP/s, in the layout of Megatron-Bridge's summary"
    )
    config = with_overrides(Config(), ["rollout.max_completion_length=4096"])
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 8192, 1
    large = KNOWN_MODELS["Qwen3-235B-A22B"]
    flops = 3 * sum(step_time.pass_flops(large, config, Workload(0, 4096)))
    step_s = pretraining_s("Qwen3-235B-A22B", 8192, (2, 8, 16, 32), 4)
    print_row("235B-A22B, 256 GPUs, TP2 x PP8 x DP16, EP32", step_s, flops / 256 / 302e12, "s")
    print("\n   Step of GRPO, NeMo-RL, H100 in BF16")
    for step in STEPS:
        policy = "one step off" if step.staleness else "on policy"
        label = f"{step.model}, {step.gpus} GPUs, {policy}, v{step.version}"
        print_row(label, step.planned_s(), step.published_s, "s")
    print("\n   Weight update, dense 32B in BF16, 2 + 2 nodes over NCCL, verl (plan: lower bound)")
    words = ["learner.pipeline_parallel_size=2", "learner.layers_in_last_pipeline_stage=none",
             "rollout.servers=2"]  # fmt: skip
    config = with_overrides(study("", 64, "bf16"), words)
    print_row("TP8 x PP2", plan_publish(KNOWN_MODELS["Qwen2.5-32B"], config).time_s, 14.2, "s")


if __name__ == "__main__":
    main()
