"""Play ranks of sixteen layouts on fake GPUs, and compare them with the plan.

    python -m benchmarks.rehearsal [--layers N] [NAME...]

A few layers at the width of a 32B model; `--layers 64` is all of Qwen2.5-32B. The fast tests play
`IN_CI` of these layouts (`tests/test_rehearsal.py`).
"""

import dataclasses
from collections import Counter

from benchmarks import machine
from qurl_megatron.config.gpus import GIB, Node
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.rehearsal import transformer_engine
from qurl_megatron.extensions.rehearsal.rehearsal import Rehearsal, play
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes import gsm8k_ppo, qwen3_moe, scaling_32b

# Whatever a layout does not name.
PLAIN = """learner.layers_in_last_pipeline_stage=none learner.data_parallel_size=1
    learner.expert_parallel_size=1 learner.pipeline_parallel_size=1 learner.micro_batch_size=1
    learner.tokens_per_micro_batch=none learner.virtual_pipeline_parallel_size=1
    rollout.max_prompt_length=1024 rollout.max_completion_length=8192"""

# Model, layers, rank, and what the layout names.
LAYOUTS = {
    "packs": """Qwen2.5-32B 2 0 learner.tensor_parallel_size=8 learner.data_parallel_size=2
        learner.tokens_per_micro_batch=18432 quantization.format=int8""",
    "context": """Qwen3-32B 2 8 learner.tensor_parallel_size=4 learner.context_parallel_size=2
        learner.pipeline_parallel_size=2 learner.recompute=selective learner.offload_optimizer=true
        quantization.format=fp8 quantization.publish=delta optimizer.minibatches_per_step=1""",
    "virtual": """Qwen2.5-32B 4 0 learner.tensor_parallel_size=2 learner.pipeline_parallel_size=2
        learner.virtual_pipeline_parallel_size=2 learner.data_parallel_size=2
        learner.recompute=full learner.recompute_layers=1 quantization.format=fp8-block
        optimizer.minibatches_per_step=1""",
    "experts": """Qwen3-30B-A3B 1 0 learner.tensor_parallel_size=2 learner.data_parallel_size=32
        learner.expert_parallel_size=32 learner.expert_tensor_parallel_size=2
        quantization.transport=direct optimizer.minibatches_per_step=1""",
    "32b on 64": """Qwen2.5-32B 8 0 learner.tensor_parallel_size=8
        learner.pipeline_parallel_size=4 learner.data_parallel_size=2""",
    "last stage": """Qwen2.5-32B 8 24 learner.tensor_parallel_size=8
        learner.pipeline_parallel_size=4""",
    "second replica": """Qwen2.5-32B 4 15 learner.tensor_parallel_size=8
        learner.data_parallel_size=2 quantization.format=fp8-tensor""",
    "no tensor parallelism": """Qwen3-32B 2 0 learner.tensor_parallel_size=1
        learner.data_parallel_size=8 quantization.format=bf16""",
    "recompute": """Qwen3-32B 4 0 learner.tensor_parallel_size=8
        learner.pipeline_parallel_size=2 learner.recompute=full""",
    "long context": """Qwen2.5-32B 2 0 learner.tensor_parallel_size=8
        learner.context_parallel_size=4 rollout.max_completion_length=31744""",
    "few experts a rank": """Qwen3-30B-A3B 1 0 learner.tensor_parallel_size=2
        learner.data_parallel_size=4 learner.expert_parallel_size=8""",
    "critic": """Qwen2.5-32B 2 0 learner.tensor_parallel_size=8 learner.data_parallel_size=2
        objective.advantage_estimator=gae quantization.format=int4""",
    "hybrid": """Qwen3.5-27B 4 0 learner.tensor_parallel_size=4 learner.data_parallel_size=2
        learner.tokens_per_micro_batch=9216 optimizer.minibatches_per_step=1""",
    "hybrid, last stage": """Qwen3.5-27B 8 4 learner.tensor_parallel_size=4
        learner.pipeline_parallel_size=2 learner.recompute=selective""",
    "hybrid with experts": """Qwen3.5-35B-A3B 4 0 learner.tensor_parallel_size=2
        learner.data_parallel_size=4 learner.expert_parallel_size=8
        learner.tokens_per_micro_batch=9216 optimizer.minibatches_per_step=1""",
    "adapters": """Qwen2.5-32B 2 0 learner.tensor_parallel_size=2 adapters.rank=16
        learner.tokens_per_micro_batch=9216 learner.recompute=full quantization.format=int4
        optimizer.minibatches_per_step=1""",
    "as served": """Qwen2.5-32B 2 0 learner.tensor_parallel_size=8 learner.data_parallel_size=2
        learner.tokens_per_micro_batch=18432 quantization.format=int8
        learner.quantized_forward=all optimizer.minibatches_per_step=1""",
}
IN_CI = ("packs", "context", "virtual", "experts", "hybrid")


def rehearsal(name: str, layers: int | None = None) -> Rehearsal:
    """Return the rehearsal of a layout, with Transformer Engine if its Python is there."""
    model, few_layers, rank, *words = LAYOUTS[name].split()
    architecture = first_layers(KNOWN_MODELS[model], layers or int(few_layers))
    recipe = qwen3_moe if architecture.num_experts else scaling_32b
    recipe = gsm8k_ppo if "objective.advantage_estimator=gae" in words else recipe
    config = with_overrides(recipe.recipe(), [f"model={model}", *PLAIN.split(), *words])
    return Rehearsal(architecture, config, Node(), [int(rank)], transformer_engine.find())


def first_layers(architecture: Architecture, layers: int) -> Architecture:
    """Return a model with only its first `layers` layers."""
    linear = architecture.delta_net
    if linear is not None:
        linear = dataclasses.replace(linear, layers=linear.layers[:layers])
    return dataclasses.replace(architecture, num_layers=layers, delta_net=linear)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    names = arguments.names or list(LAYOUTS)
    print(
        "layout, rank: GiB traced, and the plan's error; waits, kernels of update and publish; CPU"
    )
    for name, played in zip(
        names, play([rehearsal(name, arguments.layers) for name in names]), strict=True
    ):
        print(f"{name}, {played.rank}: ", end="")
        if played.error:
            print(played.error)
            continue
        for peak, traced in played.traced.items():
            off = f" {played.planned[peak] / traced - 1:+.1%}" if played.planned else ""
            print(f"{peak} {traced / GIB:.2f}{off}; ", end="")
        for phase in (played.phases["update"], played.phases["publish"]):
            waits = Counter(phase["waits"]).total() + Counter(phase["copies"]).total()
            print(f"{waits} waits, {Counter(phase['kernels']).total():,} kernels; ", end="")
        print(f"{played.cpu_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
