"""The configuration of a run: dataclasses with a docstring below every field.

A recipe is a function that returns a `Config`. `with_overrides` applies overrides to it
and `validate` names the first field that does not fit. Both raise `ConfigError`, whose text is the
one line a user sees. `meanings.field_docs` returns the docstrings below the fields, so a type
checker, an editor, `qurl config` and the documentation all show the same text.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le

from qurl_megatron.config.values import (
    MOST,
    Count,
    CountOrZero,
    DataName,
    Day,
    Directory,
    Finite,
    Fraction,
    FractionOrZero,
    GroupSize,
    LearningRate,
    Lines,
    NonNegative,
    OptionName,
    OptionValue,
    Place,
    Placement,
    Positive,
    Ranks,
    RunName,
    Scale,
    Seconds,
    Seed,
    Sequences,
    SequencesOrZero,
    Several,
    Signed,
    Smoothing,
    Temperature,
    Template,
    Text,
    Threads,
    TopP,
    Url,
    VariableName,
    VariableText,
    at_home,
    matching,
)

Objective = Literal[
    "naive", "on_policy", "decoupled", "tis", "acr", "sequence_tis", "gspo", "cispo"
]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
ObjectiveName = Annotated[
    str,
    matching(
        rf"{'|'.join(OBJECTIVES)}|[^:]+:[^\W\d]\w*",
        f"no such objective; there are {', '.join(OBJECTIVES)}, and a function of your own is "
        "FILE.py:NAME or MODULE:NAME",
    ),
    at_home,
]
Estimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
]
WITHOUT_GROUPS = ("gae", "reinforce_plus_plus")
"""Estimators that do not compare the completions of a prompt."""
FormatName = Literal["bf16", "int8", "int4", "fp8", "fp8-tensor", "fp8-block"]
WeightFormat = Literal["bf16", "int8", "int4", "int4-g32", "fp8", "fp8-tensor", "fp8-block"]
"""A format and its group size as one name: int4 has groups of 128, int4-g32 of 32."""
PauseMode = Literal["retract", "in_place"]
Releases = Literal["auto", "cache", "all"]
Transport = Literal["broadcast", "direct", "auto"]
VERIFIER_NAMES = ("math", "gsm8k", "gsm8k_flexible", "dapo", "deepscaler", "reasoning_gym", "exact")
RecomputeMode = Literal["selective", "full"]
Rounding = Literal["unbiased", "nearest"]
Schedule = Literal["constant", "linear", "cosine"]
QuantizedForward = Literal["weights", "all"]
Unusable = Literal["drop", "refuse"]
"""What happens to an entry of the data that cannot be used."""
Overlong = Literal["drop", "refuse", "truncate_left", "truncate_right"]

_REWARD = rf"(?:{'|'.join(VERIFIER_NAMES)}|[^:,]+:[^\W\d]\w*)"
_NO_REWARD = (
    f"no such verifier; there are {', '.join(VERIFIER_NAMES)}, and a function of your own is "
    "FILE.py:NAME or MODULE:NAME"
)
RewardName = Annotated[str, matching(_REWARD, _NO_REWARD), at_home]
Rewards = Annotated[Several, matching(rf"{_REWARD}(?:,\s*{_REWARD})*", _NO_REWARD)]

FunctionName = Annotated[
    str, matching(r"([^:]+:[^\W\d]\w*)?", "a function is FILE.py:NAME or MODULE:NAME"), at_home
]

# Exit code of a run that was asked to stop early and can be resumed: EX_TEMPFAIL of sysexits.h.
STOPPED_EARLY = 75
SAID_WHY = 3  # exit code of every learner rank after a failure that the console already explains


class ConfigError(ValueError):
    """A configuration that cannot run; the text says what is wrong and what would be right."""


def reward_title(reward: str) -> str:
    """Return the name of a reward among several, in metrics: that of its function."""
    return reward.rpartition(":")[2]


def with_group_size(name: FormatName, group_size: int) -> WeightFormat:
    """Return a format and its group size as one name."""
    return "int4-g32" if name == "int4" and group_size == 32 else name


@dataclasses.dataclass
class ReadingConfig:
    """How entries of `data` become prompts."""

    question_key: Text = ""
    """Field of `data` that holds the question, a text or chat messages; `a.b` is field b of field
    a. Empty: question, prompt, problem or messages."""

    answer_key: Text = ""
    """Field of `data` that holds the answer; `a.b` is field b of field a. Empty: answer,
    reward_model.ground_truth, or the assistant's last message."""

    incomplete: Unusable = "refuse"
    """What happens to entries without an answer, also in a run's `evaluation.data`. drop: they are
    left out and counted. refuse: nothing starts."""

    ignore_media: bool = False
    """Leave images, audio and video out of entries, also of a run's `evaluation.data`, and use
    their text alone. False: such entries are refused."""

    system_prompt: Lines = ""
    """System message put before each question that has none; the tokenizer needs a chat template.
    Empty: none."""

    chat_template: Template = ""
    """Chat template in place of the model's: a file, or the name of one of the model's several. A
    run keeps its text, and writes it into `final_model`. Empty: the model's."""

    chat_template_options: dict[OptionName, Any] = dataclasses.field(default_factory=dict)
    """Variables of the chat template, by name, such as `enable_thinking`."""

    template_date: Day = ""
    """Day, such as 2026-11-26, that a chat template prints as today's date. Empty: the day on which
    the run or `qurl eval` begins."""

    options: dict[OptionName, Any] = dataclasses.field(default_factory=dict)
    """Options of the reasoning-gym task of `data`, by name."""

    @property
    def template(self) -> tuple[dict[str, Any], str, str]:
        """The arguments of `load_tokenizer` behind the directory, with a template that is read."""
        return self.chat_template_options, self.template_date, self.chat_template


@dataclasses.dataclass
class PromptsConfig(ReadingConfig):
    """How entries of `data` become prompts, and which of them an epoch serves."""

    weights: list[Annotated[Finite, Ge(0), Le(1000)]] = dataclasses.field(default_factory=list)
    """Number of times that an epoch serves a prompt of each source of `data`, in their order; 0.5:
    every other one, by chance. Empty: 1 each."""

    overlong: Overlong = "drop"
    """What happens to prompts of `data` longer than `rollout.max_prompt_length`. drop: they are
    left out and counted. refuse: the run does not start. truncate_left, truncate_right: they lose
    their first or last tokens, those of the chat template too. In `evaluation.data` they are always
    refused."""

    shuffle: bool = True
    """Serve prompts in a new random order in each epoch. False: always in the order of `data`."""


@dataclasses.dataclass
class ScoringConfig:
    """How completions become rewards."""

    right: Signed = 1.0
    """Reward of a right completion, with a built-in verifier."""

    wrong: Signed = 0.0
    """Reward of a wrong completion, with a built-in verifier; -1 in DAPO. It also goes to a
    completion whose verifier fails."""

    partial: bool = False
    """Give a completion that is partly right its share of the way from `wrong` to `right`. Only
    reasoning_gym's scorers give such credit; otherwise it counts as wrong."""

    weights: list[Signed] = dataclasses.field(default_factory=list)
    """Weight of each reward, in the order of `reward`. Empty: 1 each."""

    by_source: dict[Text, RewardName] = dataclasses.field(default_factory=dict)
    """Rewards of entries by their field `data_source`, in place of the first of `reward`."""

    timeout_s: Seconds = 60.0
    """Maximum time of one call of a reward function of your own, in seconds. Built-in verifiers
    have 3 seconds of CPU time."""

    import_timeout_s: Seconds = 30.0
    """Maximum time for the import of a reward function of your own, in seconds; a reward that loads
    a model needs more."""

    workers: CountOrZero = 0
    """Number of processes that score completions by each reward. A reward that waits for a service
    needs more of them, unless it is `async`. 0: a quarter of the cores, from 1 to 16."""


@dataclasses.dataclass
class LearnerConfig:
    """The full-precision policy that Megatron-core trains."""

    tensor_parallel_size: Ranks = 1
    """Number of tensor-parallel ranks; they share every layer."""

    pipeline_parallel_size: Ranks = 1
    """Number of pipeline stages; each holds some of the layers."""

    data_parallel_size: Ranks = 1
    """Number of data-parallel replicas of the model; each trains on its share of a batch."""

    virtual_pipeline_parallel_size: Ranks = 1
    """Number of virtual stages per pipeline stage; more of them shorten the pipeline bubble. 1: no
    virtual stages."""

    layers_in_last_pipeline_stage: Count | None = None
    """Number of layers in the last pipeline stage, which also has the output layer. None: as many
    as in the other stages."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the forward and backward pass. Master weights are always float32."""

    micro_batch_size: Sequences = 8
    """Maximum number of sequences in one forward pass. They are packed one after another, without
    padding."""

    threads_per_rank: Threads = 1
    """Number of CPU threads of each learner process."""

    recompute: RecomputeMode | None = None
    """What the backward pass computes again to save memory, which takes time. selective: the
    outputs of norms and of SwiGLU, which takes little time. full: whole layers, of which only the
    input is kept. None: nothing."""

    tokens_per_micro_batch: Count | None = None
    """Maximum number of tokens in one forward pass, in place of `micro_batch_size`; a longer
    sequence gets a pass of its own. A prompt counts for each of its completions, though they share
    it. None: `micro_batch_size` limits the sequences instead."""

    context_parallel_size: Ranks = 1
    """Number of context-parallel ranks; they share every sequence."""

    recompute_layers: Count | None = None
    """Number of layers that `recompute=full` computes again in each pipeline stage or, if there are
    virtual stages, in each of them. The other layers keep everything. None: all layers. Only full
    uses it."""

    offload_optimizer: bool = False
    """Keep master weights and Adam's moments in the host's memory while activations use the GPU's.
    They are copied to the host and back once per optimizer step."""

    expert_parallel_size: Ranks = 1
    """Number of ranks over which the experts of a layer are divided, as whole experts. They are
    ranks of tensor, context and data parallelism, not additional ones."""

    expert_tensor_parallel_size: Ranks = 1
    """Number of ranks that share every expert. They are ranks of tensor, context and data
    parallelism, not additional ones."""

    quantized_forward: QuantizedForward | None = None
    """Train the quantized policy (quantization-aware training): what the learner's linear layers
    quantize as the rollout servers do. weights: their weights. all: also the activations, if
    `quantization.format` does. Gradients pass straight through to the full-precision master
    weights. Each rank then also holds its codes while it computes. None: nothing."""

    @property
    def world_size(self) -> int:
        """Number of learner ranks."""
        replica = (
            self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        )
        return replica * self.data_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Number of copies of every expert."""
        experts = self.expert_parallel_size * self.expert_tensor_parallel_size
        return self.world_size // (self.pipeline_parallel_size * experts)


@dataclasses.dataclass
class OptimizerConfig:
    """Megatron's Adam with its scheduler and gradient clipping."""

    learning_rate: LearningRate = 1e-6
    """Learning rate after warm-up, and until it falls."""

    warmup_steps: CountOrZero = 0
    """Number of optimizer steps over which the learning rate rises from 0. 0 disables."""

    schedule: Schedule = "constant"
    """How the learning rate falls towards the end of the run: constant, linear or cosine. A run
    that resumes with other `steps` or `minibatches_per_step` has the schedule of the new numbers,
    from the step that it has reached."""

    decay_fraction: Annotated[Finite, Gt(0), Le(1)] = 1.0
    """Part of the run, at its end, in which the learning rate falls. Below 1 it is constant before
    (WSD: warm-up, stable, decay)."""

    min_learning_rate: NonNegative = 0.0
    """Learning rate to which it falls."""

    beta1: FractionOrZero = 0.9
    """Adam's decay rate of the gradient's running mean."""

    beta2: FractionOrZero = 0.999
    """Adam's decay rate of the squared gradient's running mean."""

    epsilon: Annotated[Finite, Ge(1e-20), Le(1)] = 1e-8
    """Adam's constant in the denominator. It must be a float32 number above 0."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay. 0 disables."""

    clip_grad: NonNegative = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 disables."""

    minibatches_per_step: Count = 1
    """Number of optimizer steps per rollout batch. The first one's own forward pass gives the
    proximal log-probs of its minibatch; the other minibatches need an extra pass."""

    rounding: Rounding = "unbiased"
    """How float32 masters become BF16, for a bfloat16 learner, for servers and in files. unbiased:
    up or down in proportion to the distance, by a fixed dither, so that small updates act at once.
    nearest: to the nearest BF16 number, which hides an update until a weight has crossed half the
    distance to the next one."""


@dataclasses.dataclass
class ObjectiveConfig:
    """The policy objective, one of QuRL's (Eq. 1, 3, 4, 5 and 9) or another, and its advantages."""

    objective: ObjectiveName = "acr"
    """Policy objective. naive: Eq. 3. on_policy: Eq. 1. decoupled: Eq. 4. tis: truncated importance
    sampling, Eq. 5. acr: adaptive clipping range, Eq. 9; it differs from tis in tokens that are
    clipped and above C. sequence_tis, experimental: truncated importance sampling by sequence; each
    token is weighted by the product of its sequence's ratios. gspo: the mean ratio of a sequence is
    clipped, within thousandths. cispo: the ratio is a capped weight, so no token loses its
    gradient. FILE.py:NAME or MODULE:NAME: a function of your own."""

    eps_low: Annotated[Finite, Ge(0), Le(1)] = 0.2
    """Clipping range below 1: the policy ratio is clipped at 1 - eps_low. gspo's paper has 3e-4;
    cispo does not use it."""

    eps_high: NonNegative = 0.28
    """Clipping range above 1: the policy ratio is clipped at 1 + eps_high; acr can widen it. gspo's
    paper has 4e-4; of cispo, 1 + eps_high is the cap (4 is TRL's epsilon_high=5)."""

    ratio_cap: Positive = 2.0
    """Cap C on the ratio of proximal to behaviour probability (Eq. 5 and 9), or for sequence_tis on
    its product over a sequence. naive, on_policy and decoupled do not use it."""

    aggregation: Literal["sequence_mean", "token_mean", "dr_grpo"] = "sequence_mean"
    """The average of token losses. sequence_mean: over each completion, then over completions.
    token_mean: over all tokens of the minibatch. dr_grpo: their sum divided by a constant, the
    minibatch's completions x `rollout.max_completion_length` (the longest of all stages)."""

    kl_coefficient: NonNegative = 0.0
    """Weight of GRPO's KL penalty (the k3 estimator, at most 10 per token) towards the model before
    RL. 0 disables it, and no reference policy is kept."""

    entropy_coefficient: NonNegative = 0.0
    """Weight of an entropy bonus: the mean entropy of the trained tokens, in nats, averaged as
    `aggregation` says. It keeps a policy exploring. 0 disables it."""

    dual_clip: Annotated[float, Gt(1), Le(1e6)] | None = None
    """Bound on the policy ratio of tokens with a negative advantage; beyond it a token has no
    gradient (dual clip, verl's clip_ratio_c). None: no bound."""

    advantage_estimator: Estimator = "grpo"
    """Advantages. grpo: rewards less the mean of their prompt's group, over its standard deviation.
    dr_grpo: less the mean only. rloo: less the mean of the others. reinforce_plus_plus: whitened
    over the tokens of the step; its _baseline variant first takes away the group's mean. gae: PPO,
    with a critic."""


@dataclasses.dataclass
class CriticConfig:
    """PPO's value model: the policy's architecture with a value head, on the policy's ranks.

    It exists only with `objective.advantage_estimator=gae`. Its data-parallel size is the policy's
    number of ranks divided by the critic's tensor and pipeline sizes.
    """

    model: Place = ""
    """Hugging Face directory or model of the Hub that the critic starts from. Empty: the
    policy's."""

    tensor_parallel_size: Ranks | None = None
    """Number of tensor-parallel ranks. None: the policy's."""

    pipeline_parallel_size: Ranks | None = None
    """Number of pipeline stages. None: the policy's."""

    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5)
    )
    """The critic's own optimizer."""

    value_clip: Positive = 0.5
    """Clipping range of the value loss: how far from its old prediction a value can move before its
    gradient is clipped."""

    discount: Annotated[Finite, Gt(0), Le(1)] = 1.0
    """Discount factor gamma per token."""

    gae_lambda: Annotated[Finite, Ge(0), Le(1)] = 1.0
    """Lambda of generalized advantage estimation."""

    def layout(self, learner: LearnerConfig) -> LearnerConfig:
        """Return the critic's layout on the ranks of a policy with layout `learner`."""
        layout = dataclasses.replace(
            learner,
            tensor_parallel_size=self.tensor_parallel_size or learner.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size or learner.pipeline_parallel_size,
            data_parallel_size=1,
        )
        layout.data_parallel_size = learner.world_size // layout.world_size
        # These two fields are for the policy's number of stages.
        if layout.pipeline_parallel_size != learner.pipeline_parallel_size:
            layout.virtual_pipeline_parallel_size = 1
            layout.layers_in_last_pipeline_stage = None
        return layout


@dataclasses.dataclass
class UaqConfig:
    """Update-aware quantization (UAQ, QuRL Eq. 11): invariant scaling of the weights at load.

    Measurements show that it only makes a larger step for the weights that it divides
    (docs/findings/objectives.md). So it is off by default, and on in the paper's recipes.
    """

    scale: Scale = 1.0
    """Scale s that the weights are divided by. 1 turns it off. The paper finds 1.5 best, and its
    recipes have it. A model with experts needs a power of two: `qurl train` refuses any other
    number, but replaces a recipe's own by 2, unless that is 1."""

    layer_scales: dict[int, Scale] = dataclasses.field(default_factory=dict)
    """Scale s of individual layers, by layer number from 0, which overrides `scale`."""

    through_value: bool = False
    """Also divide o_proj by s and multiply v_proj by s."""

    through_up: bool = False
    """Also divide down_proj by s and multiply up_proj by s."""


# Fields that decide a completion's score, beside its own length.
OF_SCORES = (
    *("reward", "scoring.right", "scoring.wrong", "scoring.partial", "scoring.weights"),
    *("scoring.by_source", "rollout.agent", "rollout.max_turns", "rollout.max_episode_tokens"),
)
# Fields that decide the codes of a quantized copy.
OF_COPY = tuple(f"quantization.{name}" for name in ("format", "group_size", "keep", "smoothing"))


@dataclasses.dataclass
class QuantizationConfig:
    """The quantized copy of the policy that the rollout servers run."""

    format: FormatName = "int8"
    """Weight format of the rollout. int8 and fp8 have a scale per output channel, int4 one per
    output channel and `group_size` inputs, fp8-tensor one per tensor, fp8-block one per 128x128
    block. With int4, activations stay in BF16. bf16 is not quantized, and `qurl train` then turns
    off a recipe's UAQ."""

    group_size: GroupSize = 128
    """Number of neighbouring input channels that share a scale, in format int4. It must divide the
    input channels of every layer on a server's rank."""

    uaq: UaqConfig = dataclasses.field(default_factory=UaqConfig)
    """Update-aware quantization."""

    bucket_bytes: Annotated[int, Ge(1024 * 1024), Le(1024**4)] = 512 * 1024 * 1024
    """Maximum number of bytes in one weight transfer to the servers. A weight larger than that
    travels alone."""

    publish: Literal["full", "delta", "auto"] = "full"
    """What a publish sends to rollout servers that hold the version before. full: all tensors.
    delta: only the elements that changed. Each learner rank then keeps what it sent last, in a byte
    per quantized and two per other parameter. auto: deltas, until one exceeds half of all tensors'
    bytes; from then on all tensors. Evaluation servers always get all tensors."""

    transport: Transport = "broadcast"
    """How weights reach the servers. broadcast: in buckets, over process groups. direct: each
    learner rank writes into the parameters of the servers on its machine, and nothing is gathered;
    the machine of every server must have a learner rank, and publish must be full. auto: direct
    where that is possible, else broadcast. It has no effect with `rollout.placement=colocated`,
    where `releases` decides."""

    keep: list[Text] = dataclasses.field(default_factory=list)
    """Linear layers that stay in BF16 in the rollout servers, by name or pattern:
    [model.layers.0, "*.down_proj"]. q, k and v of a block are kept together, and so are gate and
    up. `qurl mismatch` recommends some. Empty: none."""

    smoothing: Smoothing = 0.0
    """SmoothQuant's exponent: by how much outliers in activations are moved into the weights that
    multiply them, in the rollout servers. Each input channel has a scale, chosen once from 64
    prompts, drawn from all to train on. It is a power of two, so that before quantization nothing
    changes. 0.5 is a good value for int8; 0: none."""

    @property
    def weight_format(self) -> WeightFormat:
        """The format and its group size."""
        return with_group_size(self.format, self.group_size)


@dataclasses.dataclass
class AdaptersConfig:
    """Low-rank adapters (LoRA) over a base that is quantized once; only adapters are trained.

    Learner and servers hold the same codes, in `quantization.format`, and only adapters are
    published. So quantization masks no update.
    """

    rank: CountOrZero = 0
    """Rank of the adapters. 0: none, the whole model is trained."""

    alpha: Positive = 32.0
    """Adapters are multiplied by alpha / rank."""

    targets: list[Text] = dataclasses.field(default_factory=list)
    """Linear layers with adapters, by name or pattern as in `quantization.keep`: [q_proj, v_proj].
    Empty: all. Experts have none."""

    init: Place = ""
    """Directory of adapters to begin with, as peft or an earlier run wrote it (`final_adapters`),
    of this rank or a lower one. Empty: A is drawn, and B is 0."""


@dataclasses.dataclass
class ServerConfig:
    """One SGLang server."""

    tensor_parallel_size: Ranks = 1
    """Number of GPUs (without GPUs: processes) that share the model."""

    mem_fraction_static: Fraction = 0.85
    """Fraction of a GPU's free memory, at start, for weights and KV cache. It has no effect without
    GPUs."""

    max_running_requests: Sequences = 256
    """Maximum number of sequences decoded at once."""

    max_total_tokens: Count | None = None
    """Size of the KV cache, in tokens. None: as many as fit in the memory; without GPUs as many as
    `max_running_requests` of the maximum length need, if the free memory holds them."""

    threads: Threads = 1
    """Number of CPU threads of each process without a GPU. More threads than free cores slow
    everything down."""

    start_timeout_s: Seconds = 1200.0
    """Maximum time to start, in seconds. On GPUs a first start compiles kernels, for minutes."""

    releases: Releases = "auto"
    """With `rollout.placement=colocated`, what a server gives back while it sleeps. cache: its KV
    cache and CUDA graphs; the weights stay, and learner ranks write into them. all: its weights
    too, which then cross the host's memory in each publish. auto: all for the evaluation server;
    for a rollout server cache if the plan fits its weights beside the learner, else all."""

    options: dict[OptionName, OptionValue] = dataclasses.field(default_factory=dict)
    """Further options of `sglang.launch_server`, by name with underscores: kv_cache_dtype=fp8_e4m3.
    true gives a flag. A refusal lists the options that are safe for log-probs and versions."""

    environment: dict[VariableName, VariableText] = dataclasses.field(default_factory=dict)
    """Variables in the server's environment: environment.NAME=value. Of the shell's variables it
    gets no `SGLANG_*`, `SGL_*`, `TORCH*`, `ONEDNN*` and `DNNL_*`, because these change what it
    samples or reports."""

    expert_parallel_size: Ranks = 1
    """Mixture of experts: number of groups of the server's ranks over which whole experts are
    divided. It must divide `tensor_parallel_size`. The ranks of a group share each of its experts.
    1: all ranks share every expert."""


@dataclasses.dataclass
class StageConfig:
    """A later stage of training: the values that replace those of `RolloutConfig`."""

    max_completion_length: Count
    """Maximum completion length, in tokens."""

    completions_per_prompt: Sequences
    """Number of completions to each prompt."""


@dataclasses.dataclass
class SamplingConfig:
    """Completions: single answers, or episodes of several turns that an agent plays."""

    temperature: Temperature = 1.0
    """Sampling temperature: of training, or of the sampled answers of `qurl eval`."""

    top_p: TopP = 1.0
    """Draw each token only from the likeliest ones, which have this probability together. In
    training, below 1 a token carries the ids of its candidates, at most 512, and all its log-probs
    are over these. 1: from the whole vocabulary."""

    stop_token_ids: list[CountOrZero] = dataclasses.field(default_factory=list)
    """Tokens that end an answer, by number; a `model_builder` may teach the first. Empty: the token
    with which the chat template ends an assistant's turn, the tokenizer's end token, and the
    eos_token_id of generation_config.json and config.json. A resume takes those of the run's first
    start, unless it is given others."""

    max_prompt_length: Count = 1024
    """Maximum prompt length, in tokens. A run's `prompts.overlong` says what becomes of longer
    ones; `qurl eval` refuses them."""

    max_completion_length: Count = 1024
    """Maximum completion length, in tokens. Longer completions are truncated. With an `agent`, the
    maximum length of a turn."""

    agent: FunctionName = ""
    """FILE.py:NAME or MODULE:NAME of an `async def NAME(policy, problem)` that plays an episode of
    several turns and returns its reward. Empty: a completion is a single answer."""

    max_turns: CountOrZero = 0
    """Maximum number of turns of an episode. 0: no limit."""

    max_episode_tokens: CountOrZero = 0
    """Maximum length of a sequence in tokens: its prompt, and what the policy samples and
    reads. 0: `max_prompt_length` plus the `max_completion_length` of the stage."""

    agent_workers: CountOrZero = 0
    """Number of processes that play episodes. 0: a quarter of the cores, from 1 to 16."""

    agent_episodes: CountOrZero = 0
    """Maximum number of episodes that a process plays at once; others wait. 0: no limit."""

    agent_timeout_s: Seconds = 600.0
    """Maximum time of an episode, in seconds, including the time that the servers take."""

    agent_turn_timeout_s: Seconds = 60.0
    """Maximum time of an agent between two turns, in seconds, such as for a tool."""

    @property
    def longest_completion(self) -> int:
        """Maximum completion length, in tokens."""
        return self.max_completion_length

    @property
    def max_length(self) -> int:
        """Maximum length of a sequence, in tokens."""
        return self.max_episode_tokens or self.max_prompt_length + self.longest_completion


@dataclasses.dataclass
class RolloutConfig(SamplingConfig):
    """Sampling at each rollout step, and the servers that sample."""

    prompts_per_step: Count = 64
    """Number of prompts in one rollout step."""

    completions_per_prompt: Sequences = 8
    """Number of completions to each prompt: GRPO's group size."""

    dynamic_sampling_tries: CountOrZero = 0
    """Maximum number of times per step that zero-variance groups (all rewards equal; of several
    rewards, their weighted sums) are replaced by new prompts. 0 disables."""

    soft_overlong_tokens: CountOrZero = 0
    """Number of tokens before `max_completion_length` over which the reward falls linearly by 1
    (DAPO's soft overlong punishment). An `agent`'s longest turn counts. 0 disables."""

    retire_after: CountOrZero = 0
    """Leave a prompt out of later epochs when the rewards of its completions were equal in its last
    so many groups: it is always solved, or always failed. Of several rewards, the first is judged.
    If fewer than `prompts_per_step` would be left, an epoch has all prompts. Groups are counted
    anew from a stage on, and from a resume with other lengths, sampling or rewards; so the next
    epoch has all prompts too. 0 disables."""

    mask_truncated: bool = False
    """Leave completions out of the loss that a limit cut off (DAPO's overlong filtering). Their
    rewards still count in the baseline of their group."""

    stages: dict[Annotated[int, Ge(2), Le(MOST)], StageConfig] = dataclasses.field(
        default_factory=dict
    )
    """Later stages of training, by their first step. Weights, optimizer and position in the data
    carry over."""

    servers: Annotated[int, Ge(0), Le(512)] = 1
    """Number of server replicas that the run starts. They hold the same weights and share the
    prompts. 0: only those of `servers_at` sample."""

    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    """Each rollout server."""

    min_servers: Count = 1
    """Minimum number of servers to sample with. While fewer serve, sampling waits for lost servers
    to be started again. After `server.start_timeout_s` the run saves a checkpoint and ends with
    exit code 75; `qurl resume` continues it."""

    max_staleness: CountOrZero = 0
    """Maximum age of a trained token, in updates from the weights that sampled it to the weights
    that it trains. The servers sample up to that many steps ahead. 0: they sample each step's
    completions from its own weights, and are idle while the learner trains."""

    pause_mode: PauseMode = "retract"
    """What a publish does to running requests. retract: their context is computed again with the
    new weights. in_place: they keep the keys and values of older weights, which is cheaper for long
    contexts; their log-probs are then those of the mixture."""

    routing: Literal["ignore", "compare", "replay"] = "ignore"
    """Mixture of experts: what the learner does with the experts that the servers chose for each
    token. ignore: they are not recorded. compare: the learner counts how many of them it chooses
    too. replay: the learner's forward passes choose the same. A request that a publish retracts has
    the experts of the pass that computed its context again. Recording takes 4 bytes per layer and
    chosen expert for each token of the KV cache, in a server's main memory."""

    accept_mismatch: bool = False
    """Train although the servers' log-probs are further from the learner's than the weight format
    explains, or completions of a prompt are equal. Otherwise the run ends before it trains."""

    placement: Placement = "separate"
    """Which GPUs the servers have. separate: GPUs of their own, on the learner's nodes or others.
    colocated: the learner's, in turn. While servers sample, the learner waits in the host's
    memory, and while it trains, they sleep; only without `max_staleness`. `qurl train` chooses
    colocated where the machine has too few GPUs for separate."""

    servers_at: list[Url] = dataclasses.field(default_factory=list)
    """URLs of further servers, which somebody has started elsewhere with `qurl serve`. They get the
    weights over the same HTTP or HTTPS connection as prompts. If one does not answer, the run
    goes on and asks it again. Empty: none."""

    servers_key_file: Place = ""
    """File with the key of the servers of `servers_at`. Empty: the variable QURL_SERVERS_KEY."""

    servers_plain_http: bool = False
    """Allow http:// in `servers_at` for other addresses than loopback. The key, prompts and
    completions can then be read and changed on the way."""

    @property
    def completions_per_step(self) -> int:
        """Number of completions that a step trains on."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def longest_completion(self) -> int:
        """Maximum completion length over all stages, in tokens."""
        later = [stage.max_completion_length for stage in self.stages.values()]
        return max([self.max_completion_length, *later])

    def at(self, step: int) -> RolloutConfig:
        """Return the configuration of the stage that `step` is in, without later stages."""
        begun = [first for first in self.stages if first <= step]
        changes = vars(self.stages[max(begun)]) if begun else {}
        return dataclasses.replace(self, stages={}, **changes)


@dataclasses.dataclass
class EvaluationConfig:
    """Accuracy of the policy, served in BF16, or of its quantized copy.

    Held-out problems of the run's own data are answered greedily (temperature 0). Each file in
    `data` gets Avg@1 (greedy) and Avg@k (sampled).
    """

    problems: CountOrZero = 512
    """Maximum number of held-out problems to measure on, a sample if there are more. 0 disables,
    and none is held out: all of the data is trained on."""

    held_out_fraction: FractionOrZero = 0.1
    """Fraction of the data held out of training, chosen by a hash of each question. 0 holds out
    none, and so does `problems` of 0."""

    data: dict[DataName, Several] = dataclasses.field(default_factory=dict)
    """Data files to evaluate on, by the name they are reported under; each value has the form of
    the run's `data`."""

    k: SequencesOrZero = 0
    """Number of answers sampled to each problem of these files, for Avg@k. 0: Avg@1 only."""

    k_of: dict[DataName, SequencesOrZero] = dataclasses.field(default_factory=dict)
    """`k` of some of these files, by their names in `data`."""

    reward_of: dict[DataName, RewardName] = dataclasses.field(default_factory=dict)
    """Rewards of some of these files, by their names in `data`, in place of the run's. A file's
    averages are of its reward's `accuracy`; of a function that gives no such number, of the reward
    itself."""

    temperature: Temperature = 1.0
    """Sampling temperature of the answers for Avg@k."""

    top_p: TopP = 1.0
    """Probability mass that nucleus sampling keeps, in the answers for Avg@k."""

    every_steps: CountOrZero = 0
    """Number of rollout steps between two evaluations. 0: only before the first step and after the
    last."""

    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    """The evaluation server."""

    quantized: bool = False
    """Measure the quantized copy that rollouts sample from, which `learner.quantized_forward`
    trains, in place of the policy in BF16."""

    @property
    def held_out(self) -> float:
        """The fraction of the data that is held out: none if nothing is measured on it."""
        return self.held_out_fraction if self.problems else 0.0

    @property
    def enabled(self) -> bool:
        """True if there is anything to measure, which requires an evaluation server."""
        return bool(self.data or self.held_out)


@dataclasses.dataclass
class CheckpointConfig:
    """Checkpoints to resume from. They are written in the background during training."""

    every_steps: CountOrZero = 20
    """Number of rollout steps between two checkpoints. There is also one after the last step, and
    one after the first, which shows that the disk takes it. 0 disables checkpoints."""

    every_minutes: CountOrZero = 0
    """Number of minutes after which a checkpoint is also written, at the end of the step; for long
    steps. 0: `every_steps` alone decides."""

    keep_last: Count = 2
    """Number of newest checkpoints to keep; older ones are deleted."""

    keep_best: bool = True
    """Also keep the checkpoint of the best evaluation, as `checkpoints/best`, and save one whenever
    an evaluation is better than all before it. Of checkpoints within two standard errors of the
    highest score the newest is the best."""

    best_by: Text = ""
    """Name in `evaluation.data` of the file whose average is the score: Avg@k, or Avg@1 if its k is
    0. Empty: `held_out_accuracy`, or without it the mean over `evaluation.data`."""


@dataclasses.dataclass
class Config:
    """A training run."""

    model: Place = ""
    """Hugging Face directory: config.json, tokenizer files and safetensors. Or a model of the Hub,
    `ORG/NAME` or `ORG/NAME@REVISION`, which is downloaded into its usual cache; the run keeps the
    path of its snapshot, which ends with the commit."""

    model_builder: FunctionName = ""
    """FILE.py:NAME or MODULE:NAME of a function that writes the model to a given directory when a
    run without `model` begins. It also gets the seed, for random weights. If it returns a function,
    that is called with the run's configuration after all checks, and may train the model. Empty:
    none."""

    data: Several = ""
    """Training problems: a .jsonl, .json, .parquet, .csv or .tsv file, a dataset directory (DIR,
    DIR:SPLIT, DIR:CONFIG or DIR:CONFIG:SPLIT), a dataset of the Hub (such as
    openai/gsm8k:main:train or openai/gsm8k@REVISION:main), or reasoning_gym:TASK. Several are a
    list, and DIR/*.jsonl are all such files. The run keeps a snapshot, as for `model`."""

    reward: Rewards = "math"
    """Verifier that rewards a completion. math: math-verify. gsm8k: verl's, by the number after
    ####. gsm8k_flexible: verl's, by the last number. dapo: DAPO's, by what follows "Answer:".
    deepscaler: DeepScaleR's, by the box after </think>. reasoning_gym: the task's own scorer.
    exact: the completion is the answer. FILE.py:NAME or MODULE:NAME: a function of your own.
    Several are a list: the sum of their rewards is trained on, and accuracy is that of the
    first."""

    name: RunName = ""
    """Name of the run and of its directory. Empty: the recipe's name and the time."""

    output_dir: Directory = "runs"
    """Directory that holds the directories of runs."""

    wandb_project: Text = ""
    """Weights & Biases project that receives every metric, all attempts as one run. Without
    internet, metrics are recorded and can be sent later. Empty: none."""

    seed: Seed = 0
    """Seed of generated problems, data order, sampling, and a recipe-built model's weights."""

    steps: Count = 100
    """Number of rollout steps."""

    epochs: NonNegative = 0.0
    """Number of passes over the training prompts, from which `steps` is computed, without prompts
    that dynamic sampling takes. 0: `steps` says."""

    stop_above: dict[Text, Signed] = dataclasses.field(default_factory=dict)
    """Metrics, by their names in TensorBoard, such as held_out_accuracy or reward_parts/accuracy.
    The run ends after the step in which one is above its value here."""

    time_limit_s: Seconds | None = None
    """Maximum time of RL, in seconds. The run ends after the step that exceeds it. None: no
    limit."""

    samples_per_step: CountOrZero = 4
    """Number of completions of each step that are kept in samples.jsonl and shown in the report:
    with the highest and the lowest reward, cut off, with the largest ratio of a token. 0 keeps
    none."""

    recipe_file: dict[str, Text] = dataclasses.field(default_factory=dict)
    """SHA-256 of each file that the recipe is from, by its path. The run fills it in. Empty: a
    recipe of the package."""

    prompts: PromptsConfig = dataclasses.field(default_factory=PromptsConfig)
    """How entries of `data` become prompts."""

    scoring: ScoringConfig = dataclasses.field(default_factory=ScoringConfig)
    """How completions become rewards."""

    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    """The policy's learner."""

    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The policy's optimizer."""

    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    """The policy's objective and advantages."""

    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    """PPO's critic."""

    adapters: AdaptersConfig = dataclasses.field(default_factory=AdaptersConfig)
    """Adapters that are trained in place of the whole model."""

    quantization: QuantizationConfig = dataclasses.field(default_factory=QuantizationConfig)
    """The rollout's weights."""

    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    """Sampling and its servers."""

    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    """Evaluation of the full-precision weights."""

    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """Checkpoints to resume from."""

    @property
    def rewards(self) -> list[str]:
        """The rewards that `reward` lists, at least one."""
        return [name.strip() for name in self.reward.split(",")]

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return Path(self.output_dir) / self.name

    @property
    def evaluation_quantization(self) -> QuantizationConfig:
        """The quantization of the evaluation servers' weights."""
        if self.evaluation.quantized:
            return dataclasses.replace(self.quantization, publish="full")
        return dataclasses.replace(self.quantization, format="bf16", publish="full", keep=[])


HELD_OUT = "held_out"  # reserved name: evaluation on held-out problems of the run's own data
# The drift of a quantized weight is measured on some rows of each shard, which stand for all.
MEASURED_ROWS = 128  # at most
EXPERT_ROWS = 4  # at least, of each expert's weight; there are many
