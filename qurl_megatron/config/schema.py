"""What a run is made of: dataclasses with one default a field, unit and meaning beside each.

A recipe is a function that returns a `Config`. `with_overrides` applies `field=value` words to it,
`validate` names the first field that does not fit; both raise `ConfigError`, whose text is the one
line a user sees.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Ge, Gt, Le, Lt

Objective = Literal["naive", "on_policy", "decoupled", "tis", "acr"]
Aggregation = Literal["sequence_mean", "token_mean"]
WeightFormat = Literal["bf16", "int8", "int4", "fp8", "fp8-tensor", "fp8-block"]
AdvantageEstimator = Literal["grpo", "gae"]
Reward = Literal["reasoning_gym", "math", "exact"]

Count = Annotated[int, Ge(1)]
CountOrNone = Annotated[int, Ge(0)]  # 0 switches off what it counts
Positive = Annotated[float, Gt(0), Lt(math.inf)]
NonNegative = Annotated[float, Ge(0), Lt(math.inf)]
Fraction = Annotated[float, Gt(0), Lt(1)]
FractionOrNone = Annotated[float, Ge(0), Lt(1)]
TopP = Annotated[float, Gt(0), Le(1)]
Name = Annotated[str, pydantic.StringConstraints(pattern=r"^[\w-]+$")]

# Exit code of a run that was asked to stop early: not finished, `qurl resume` goes on. It is
# EX_TEMPFAIL of sysexits.h.
STOPPED_EARLY = 75


class ConfigError(ValueError):
    """A configuration that cannot run; the text says what is wrong and what would be right."""


@dataclasses.dataclass
class LearnerConfig:
    """The full-precision policy in Megatron-core."""

    tensor_parallel_size: Count = 1  # ranks that share every layer
    pipeline_parallel_size: Count = 1  # stages that share the layers
    data_parallel_size: Count = 1  # copies of the model, each with its part of a batch
    virtual_pipeline_parallel_size: Count = 1  # parts a stage is cut into, to shorten the bubble
    layers_in_last_pipeline_stage: Count | None = None  # None: as many as in the other stages
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the forward pass; masters are float32
    micro_batch_size: Count = 8  # sequences in one forward pass
    threads_per_rank: Count = 1  # CPU threads of each learner process
    recompute_activations: bool = False  # layers keep their input only, and are computed twice

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


@dataclasses.dataclass
class OptimizerConfig:
    """Megatron's Adam with its scheduler and gradient clipping."""

    learning_rate: NonNegative = 1e-6
    warmup_steps: CountOrNone = 0  # optimizer steps over which the learning rate rises from 0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: NonNegative = 0.0
    clip_grad: NonNegative = 1.0  # global gradient norm
    minibatches_per_step: Count = 1  # optimizer steps made of one rollout batch


@dataclasses.dataclass
class ObjectiveConfig:
    """The policy objective (QuRL Eq. 1, 3, 4, 5, 9)."""

    objective: Objective = "acr"
    eps_low: NonNegative = 0.2
    eps_high: NonNegative = 0.28
    ratio_cap: Positive = 2.0  # C of Eq. 5 and 9, on proximal / behaviour
    aggregation: Aggregation = "sequence_mean"
    kl_coefficient: NonNegative = 0.0  # of GRPO's k3 to the model as it was; 0 keeps no copy of it


@dataclasses.dataclass
class CriticConfig:
    """PPO's value model: the policy's architecture with a value head, on the same ranks.

    It is there where `advantage_estimator` is gae. Data-parallel copies are as many as the ranks
    leave room for.
    """

    model: str = ""  # Hugging Face directory it starts from; empty: the policy's
    tensor_parallel_size: Count | None = None  # None: as the policy
    pipeline_parallel_size: Count | None = None  # None: as the policy
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5)
    )
    value_clip: Positive = 0.5  # most that a step moves a value
    discount: Annotated[float, Gt(0), Le(1)] = 1.0  # gamma, of a reward one token later
    gae_lambda: Annotated[float, Ge(0), Le(1)] = 1.0

    def layout(self, learner: LearnerConfig) -> LearnerConfig:
        """The value model's, beside a policy of `learner`'s."""
        tensor_parallel_size = self.tensor_parallel_size or learner.tensor_parallel_size
        pipeline_parallel_size = self.pipeline_parallel_size or learner.pipeline_parallel_size
        as_policy = pipeline_parallel_size == learner.pipeline_parallel_size
        return dataclasses.replace(
            learner,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=learner.world_size
            // (tensor_parallel_size * pipeline_parallel_size),
            virtual_pipeline_parallel_size=(
                learner.virtual_pipeline_parallel_size if as_policy else 1
            ),
            layers_in_last_pipeline_stage=(
                learner.layers_in_last_pipeline_stage if as_policy else None
            ),
        )


@dataclasses.dataclass
class UaqConfig:
    """Invariant scaling of the policy's weights at load (QuRL Eq. 11); `uaq.py` has the reasons."""

    scale: Positive = 1.5  # s; 1 leaves the weights as they are
    layer_scales: dict[int, Positive] = dataclasses.field(
        default_factory=dict
    )  # s of single layers, by number, instead of `scale`
    through_value: bool = False  # also divide o_proj, and multiply v_proj
    through_up: bool = False  # also divide down_proj, and multiply up_proj


@dataclasses.dataclass
class QuantizationConfig:
    """How the rollout copy of the policy is made."""

    format: WeightFormat = "int8"  # given bf16 alone, `qurl train` leaves a recipe's UAQ out
    uaq: UaqConfig = dataclasses.field(default_factory=UaqConfig)
    bucket_bytes: Annotated[int, Ge(1024 * 1024)] = 512 * 1024 * 1024  # most bytes sent at once


@dataclasses.dataclass
class ServerConfig:
    """One SGLang server."""

    tensor_parallel_size: Count = 1
    mem_fraction_static: Fraction = 0.85  # of what is free of a GPU, for weights and KV cache
    max_running_requests: Count = 256
    max_total_tokens: Count | None = None  # KV cache slots; None lets SGLang fill its memory
    threads: Count = 1  # of each rank without a GPU; more spin against whatever else runs there
    start_timeout_s: Positive = 600.0


@dataclasses.dataclass
class StageConfig:
    """What a later stage of training samples in place of what `RolloutConfig` says."""

    max_response_length: Count  # tokens
    completions_per_prompt: Count


@dataclasses.dataclass
class RolloutConfig:
    """What is sampled at each step."""

    prompts_per_step: Count = 64
    completions_per_prompt: Count = 8  # the group of GRPO
    temperature: Positive = 1.0
    top_p: float = 1.0  # must stay 1: SGLang does not renormalize its log-probs
    top_k: int = -1  # must stay off, likewise
    max_prompt_length: Count = 1024  # tokens; longer prompts are refused when read
    max_response_length: Count = 1024  # tokens
    dynamic_sampling_tries: CountOrNone = 0  # rounds of new prompts for groups of equal rewards
    soft_overlong_tokens: CountOrNone = 0  # last tokens of a response over which reward falls by 1
    stages: dict[Annotated[int, Ge(2)], StageConfig] = dataclasses.field(
        default_factory=dict
    )  # by the step they begin with; weights, optimizer and place in the data go on
    servers: Count = 1  # that all hold the same weights and share the prompts
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)

    @property
    def longest_response(self) -> int:
        """Of all stages, in tokens."""
        later = [stage.max_response_length for stage in self.stages.values()]
        return max([self.max_response_length, *later])

    @property
    def max_length(self) -> int:
        """Of prompt and response together, in any stage, in tokens."""
        return self.max_prompt_length + self.longest_response

    def at(self, step: int) -> RolloutConfig:
        """What is sampled at `step`, in the words of a single stage."""
        begun = [first for first in self.stages if first <= step]
        changes = vars(self.stages[max(begun)]) if begun else {}
        return dataclasses.replace(self, stages={}, **changes)


@dataclasses.dataclass
class WarmupConfig:
    """A short supervised phase before RL, through the same learner; `max_steps` 0 leaves it out."""

    max_steps: CountOrNone = 0
    target_accuracy: Fraction = 0.35  # stops here, on warm-up problems of its own
    batch_size: Count = 128  # sequences
    learning_rate: NonNegative = 2e-3
    check_every_steps: Count = 10


@dataclasses.dataclass
class EvaluationConfig:
    """Accuracy on a BF16 server that is sent the full-precision weights.

    Greedy on problems held out of the run's data; Avg@1 and Avg@k on files of their own.
    """

    problems: CountOrNone = 512  # held-out problems at most; 0 measures none
    held_out_fraction: FractionOrNone = 0.1  # of the data, by a hash of the question; 0: none
    data: dict[Name, str] = dataclasses.field(
        default_factory=dict
    )  # files by the name they are reported under, each as `Config.data`
    k: CountOrNone = 0  # sampled answers to each problem of these files; 0: Avg@1 only
    temperature: Positive = 1.0  # of sampled answers
    top_p: TopP = 1.0
    every_steps: CountOrNone = 0  # 0: only before the first step and after the last
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to measure, and so a server for it."""
        return bool(self.data or (self.problems and self.held_out_fraction))


@dataclasses.dataclass
class CheckpointConfig:
    """What `qurl resume` goes on from, written beside training."""

    every_steps: CountOrNone = 20  # and after the last step; 0: none
    keep_last: Count = 2  # older ones are removed


@dataclasses.dataclass
class Config:
    """A run."""

    model: str = ""  # Hugging Face directory: config.json, tokenizer, safetensors
    data: str = ""  # .jsonl, .json or .parquet file, dataset directory, or reasoning_gym:TASK
    data_options: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of the reasoning-gym task
    reward: Reward = "math"
    name: str = ""  # of the run's directory; empty: recipe and time
    output_dir: str = "runs"
    wandb_project: str = ""  # of Weights & Biases, which is then told every metric; empty: none
    seed: int = 0
    steps: Count = 100  # rollout steps
    time_limit_s: Positive | None = None  # RL ends after the step that passes it
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    advantage_estimator: AdvantageEstimator = "grpo"  # gae: PPO, with a critic
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    quantization: QuantizationConfig = dataclasses.field(default_factory=QuantizationConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    warmup: WarmupConfig = dataclasses.field(default_factory=WarmupConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


HELD_OUT = "held_out"  # what evaluation on problems of the run's own data goes by
