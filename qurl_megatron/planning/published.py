"""Steps that others published, beside what a plan says of them: the error to expect of a plan.

All are GRPO steps of NeMo-RL on H100 in BF16, from the tables of its versions 0.4 to 0.6
(github.com/NVIDIA-NeMo/RL, docs/about/performance-summary.md) and the recipes beside them. On
policy, servers and learner take turns on all GPUs; one step off, each has half of them. Each prompt
has 32 responses, and there is a reference policy. Prompts of 150 tokens are assumed, and lengths
as `lengths.Workload` has them.
"""

import functools
from dataclasses import dataclass

from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.planning.lengths import Workload
from qurl_megatron.planning.rollout_time import rollout_s, server_load, steady_state
from qurl_megatron.planning.step_time import learner_s, plan_publish

LONG = 2048  # tokens of prompt and response, on average
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
    longest: int  # prompt plus response, in tokens
    mean_length: int
    prompts: int
    minibatches: int
    published_s: float

    @property
    def kind(self) -> str:
        """What steps of this kind have in common."""
        return kind_of(KNOWN_MODELS[self.model], self.mean_length)

    @functools.cached_property
    def planned_s(self) -> float:
        """The time of the step as it is planned."""
        tensor, context, experts, pipeline = self.sizes
        architecture, on_half = KNOWN_MODELS[self.model], 1 + self.staleness
        data = self.gpus // on_half // (tensor * context * pipeline)
        words = [
            f"learner.tensor_parallel_size={tensor}",
            f"learner.context_parallel_size={context}",
            f"learner.expert_parallel_size={experts}",
            f"learner.pipeline_parallel_size={pipeline}",
            f"learner.data_parallel_size={data}",
            f"learner.tokens_per_micro_batch={self.longest}",
            f"rollout.prompts_per_step={self.prompts}",
            "rollout.completions_per_prompt=32",
            f"rollout.max_response_length={self.longest - _PROMPT}",
            f"rollout.servers={self.gpus // on_half // self.server_gpus}",
            f"rollout.server.tensor_parallel_size={self.server_gpus}",
            f"rollout.max_staleness={self.staleness}",
            f"optimizer.minibatches_per_step={self.minibatches}",
            "objective.kl_coefficient=0.01",
            "quantization.format=bf16",
        ]
        if architecture.num_layers % pipeline:
            last = architecture.shorter_last_stage(pipeline)
            words.append(f"learner.layers_in_last_pipeline_stage={last}")
        if self.model in ("Llama-3.1-8B", "Qwen3-235B-A22B"):  # as in the recipes
            words.append("learner.recompute=full")
        config = with_overrides(Config(), words)
        workload = Workload(_PROMPT, self.mean_length - _PROMPT)
        publish_s = plan_publish(architecture, config).time_s if self.staleness else 0.0
        load = server_load(architecture, config, workload, 256, publish_s)
        learner_time_s = sum(learner_s(architecture, config, workload).values()) + publish_s
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
    ]
]


def kind_of(architecture: Architecture, mean_length: float) -> str:
    """Return which of the published steps a plan is like."""
    if architecture.num_experts:
        return "experts"
    return "dense, long answers" if mean_length >= LONG else "dense, short answers"


def times_longer(kind: str) -> tuple[float, float]:
    """Return how many times as long as planned published steps of a kind took: least and most."""
    ratios = [step.published_s / step.planned_s for step in STEPS if step.kind == kind]
    return min(ratios), max(ratios)
