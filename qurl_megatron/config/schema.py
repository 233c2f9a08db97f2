"""What a run is made of: dataclasses with one default a field, unit and meaning beside each.

A recipe is a function that returns a `Config`. `with_overrides` applies `field=value` words to it,
`validate` names the first field that does not fit; both raise `ConfigError`, whose text is the one
line a user sees.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import yaml
from annotated_types import Ge, Gt, Le, Lt

from qurl_megatron.model.architecture import Architecture, ArchitectureError

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


LARGEST_SHARE = 0.8  # of a GPU's memory, to servers that share it with a learner rank


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
    top_p: float = 1.0  # must stay 1: SGLang does not renormalise its log-probs
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


T = TypeVar("T")

# Dicts of any keys; a stage is given as {max_response_length: 8, completions_per_prompt: 8}.
_FREE_FORM = {
    "data_options",
    "evaluation.data",
    "quantization.uaq.layer_scales",
    "rollout.stages",
}
HELD_OUT = "held_out"  # what evaluation on problems of the run's own data goes by
_ABSENT = object()
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def with_overrides(config: T, words: list[str]) -> T:
    """`config`, a dataclass, with each `field=value` word applied; of a part `rollout.top_k=-1`.

    Raises:
        ConfigError: a word without `=`, an unknown field, or a value of the wrong type.
    """
    tree = dataclasses.asdict(config)  # type: ignore[call-overload]
    for word in words:
        path, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: not of the form field=value")
        *parents, leaf = path.split(".")
        node, known = tree, True
        for parent in parents:
            known = known and isinstance(node.get(parent), dict)
            node = node[parent] if known else node
        free_form = ".".join(parents) in _FREE_FORM
        if not known or (leaf not in node and not free_form) or isinstance(node.get(leaf), dict):
            raise ConfigError(f"{path}: no such field{_suggestion(path, tree)}")
        try:
            node[leaf] = yaml.safe_load(value) if free_form else _plain(value)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{word}: not readable as YAML ({reason})") from None
    return from_tree(type(config), tree)


def overrides_between(config: T, changed: T) -> list[str]:
    """The `field=value` words that make `changed` of `config`, of the same dataclass.

    A key that `changed` has taken out of a dict stays.
    """
    before, now = (_leaves(dataclasses.asdict(one)) for one in (config, changed))  # type: ignore[call-overload]
    words = []
    for field, value in now.items():
        if field in _FREE_FORM:
            words += [
                f"{field}.{key}={json.dumps(part)}"
                for key, part in value.items()
                if before[field].get(key, _ABSENT) != part
            ]
        elif value != before[field]:
            words.append(f"{field}={'null' if value is None else value}")
    return words


def from_tree(kind: type[T], tree: dict[str, Any]) -> T:
    """A configuration from nested dicts, every value converted to its field's type."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(tree)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{path}={first['input']}: {message}") from None


def save(config: Config, path: Path) -> None:
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def load(path: Path) -> Config:
    return from_tree(Config, yaml.safe_load(path.read_text()))


def validate(config: Config) -> Architecture:
    """Check that the fields fit each other, the model and its layout; returns the model's shape.

    Raises:
        ConfigError: the first thing that does not fit: `field=value: what is wrong`.
    """
    rollout = config.rollout
    if rollout.top_p != 1 or rollout.top_k != -1:
        field = "top_p" if rollout.top_p != 1 else "top_k"
        raise ConfigError(
            f"rollout.{field}={getattr(rollout, field)}: training wants top_p=1 and top_k=-1,"
            " because SGLang's log-probs are those of the full vocabulary, not of a truncated one"
        )
    if config.warmup.max_steps and not config.evaluation.wanted:
        raise ConfigError(
            "evaluation.problems=0: the supervised warm-up measures its accuracy on the evaluation "
            "server; ask for problems, or set warmup.max_steps=0"
        )
    if config.warmup.max_steps and config.objective.kl_coefficient:
        raise ConfigError(
            f"objective.kl_coefficient={config.objective.kl_coefficient}: the reference would be "
            "the model before its warm-up; set it to 0, or warmup.max_steps=0"
        )
    rows = [_validate_stage(config, first) for first in (1, *rollout.stages)]
    if HELD_OUT in config.evaluation.data:
        raise ConfigError(
            f"evaluation.data.{HELD_OUT}: problems of the run's own data go by that name; choose "
            "another"
        )
    if not config.data:
        raise ConfigError(
            "data=: missing; give a .jsonl or .parquet file, a dataset directory or "
            "reasoning_gym:TASK"
        )
    if config.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"wandb_project={config.wandb_project}: the package wandb is not installed; "
            "pip install wandb, or leave wandb_project empty"
        )
    architecture = _validate_model(config)
    if config.advantage_estimator == "gae":
        _validate_critic(config, architecture, rows)
    return architecture


def validate_server(
    name: str, server: ServerConfig, architecture: Architecture, length: int
) -> None:
    """Check that a server can hold this model, and `length` tokens of prompt and response.

    Raises:
        ConfigError: it cannot.
    """
    if architecture.num_attention_heads % server.tensor_parallel_size:
        raise ConfigError(
            f"{name}.tensor_parallel_size={server.tensor_parallel_size}: must divide the model's "
            f"{architecture.num_attention_heads} attention heads"
        )
    if length > architecture.max_position_embeddings:
        raise ConfigError(
            f"max_prompt_length and max_response_length add up to {length} tokens, more than the "
            f"model's {architecture.max_position_embeddings} positions"
        )


def validate_resume(saved: Config, config: Config) -> None:
    """Check that a run can go on under `config` from what it saved under `saved`.

    Raises:
        ConfigError: a field has changed that its checkpoints, or its place in the data, depend on.
    """
    before, now = _leaves(dataclasses.asdict(saved)), _leaves(dataclasses.asdict(config))
    for field, value in now.items():
        why = next((why for prefix, why in _FIXED.items() if field.startswith(prefix)), None)
        if why and before[field] != value:
            raise ConfigError(
                f"{field}={value}: the run has {before[field]}, and {why}; start a new run"
            )


def place_servers(config: Config, num_gpus: int) -> dict[str, list[list[int]]]:
    """The GPUs of each server of each set on a machine with `num_gpus`; no GPU, empty lists.

    Learner ranks have the first GPUs, one each, and servers those that follow. A server for which
    none are left shares the first ones with the learner.

    Raises:
        ConfigError: there are too few GPUs, or servers that share one ask for nearly all its
            memory.
    """
    rollout, evaluation = config.rollout, config.evaluation
    sets = {"rollout": [rollout.server] * rollout.servers}
    if evaluation.wanted:
        sets["evaluation"] = [evaluation.server]
    if num_gpus == 0:
        return {name: [[] for _ in servers] for name, servers in sets.items()}
    wanted = {"learner": config.learner.world_size}
    wanted |= {f"{name}.server": some[0].tensor_parallel_size for name, some in sets.items()}
    for name, ranks in wanted.items():
        if ranks > num_gpus:
            raise ConfigError(
                f"{name}.tensor_parallel_size: {ranks} ranks want a GPU each, NCCL allows no two "
                f"on one; this machine has {num_gpus}"
            )
    placed: dict[str, list[list[int]]] = {name: [] for name in sets}
    shares: dict[int, dict[str, float]] = {}  # of a learner's GPU, by the servers on it
    free = config.learner.world_size
    for name, servers in sets.items():
        for server in servers:
            fits = free + server.tensor_parallel_size <= num_gpus
            first = free if fits else 0
            gpus = list(range(first, first + server.tensor_parallel_size))
            placed[name].append(gpus)
            free += len(gpus) if fits else 0
            for gpu in set(gpus) & set(range(config.learner.world_size)):
                here = shares.setdefault(gpu, {})
                here[name] = here.get(name, 0.0) + server.mem_fraction_static
    for gpu, here in sorted(shares.items()):
        if sum(here.values()) > LARGEST_SHARE:
            first_set = next(iter(here))
            raise ConfigError(
                f"{first_set}.server.mem_fraction_static="
                f"{sets[first_set][0].mem_fraction_static}: the learner shares GPU {gpu} with "
                f"{' and '.join(here)}, which ask for {sum(here.values()):.2f} of it; give them "
                f"{LARGEST_SHARE} at most together, or add GPUs"
            )
    return placed


_IN_WEIGHTS = "its weights are saved so"
_IN_DATA = "its place in the data depends on it"
_FIXED = {
    "model": _IN_WEIGHTS,
    "learner.dtype": _IN_WEIGHTS,
    "advantage_estimator": "its checkpoints hold a critic or none",
    "critic.model": _IN_WEIGHTS,
    "quantization.uaq": _IN_WEIGHTS,
    "data": _IN_DATA,  # and data_options
    "seed": _IN_DATA,
    "evaluation.held_out_fraction": _IN_DATA,
    "evaluation.data": _IN_DATA,  # its questions are not trained on
    "warmup.": "its warm-up is over",
    "name": "is kept under it",
    "output_dir": "is kept there",
}


def _validate_stage(config: Config, first_step: int) -> int:
    """How many completions a step has in the stage that begins with `first_step`."""
    rollout, learner, optimizer = config.rollout.at(first_step), config.learner, config.optimizer
    field = f"rollout.stages.{first_step}" if first_step > 1 else "rollout"
    if rollout.soft_overlong_tokens >= rollout.max_response_length:
        raise ConfigError(
            f"rollout.soft_overlong_tokens={rollout.soft_overlong_tokens}: must be less than "
            f"{field}.max_response_length={rollout.max_response_length}"
        )
    if config.advantage_estimator == "grpo" and rollout.completions_per_prompt == 1:
        raise ConfigError(
            f"{field}.completions_per_prompt=1: grpo compares the completions of a prompt and "
            "wants two at least; advantage_estimator=gae takes one"
        )
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    parts = optimizer.minibatches_per_step * learner.data_parallel_size
    if rows % parts:
        raise ConfigError(
            f"optimizer.minibatches_per_step={optimizer.minibatches_per_step}: a step's {rows} "
            f"completions (rollout.prompts_per_step x {field}.completions_per_prompt) do not "
            f"divide into minibatches x {learner.data_parallel_size} data-parallel ranks"
        )
    return rows


def _validate_model(config: Config) -> Architecture:
    if not config.model:
        raise ConfigError(
            "model=: missing; give a Hugging Face directory (config.json, safetensors)"
        )
    directory = Path(config.model)
    try:
        architecture = Architecture.from_directory(directory)
        architecture.check_layout(
            config.learner.tensor_parallel_size,
            config.learner.pipeline_parallel_size,
            config.learner.virtual_pipeline_parallel_size,
            config.learner.layers_in_last_pipeline_stage,
        )
    except ArchitectureError as error:
        raise ConfigError(str(error)) from None
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model={directory}: has no .safetensors file")
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model={directory}: has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    for part, server in (
        ("rollout", config.rollout.server),
        ("evaluation", config.evaluation.server),
    ):
        validate_server(f"{part}.server", server, architecture, config.rollout.max_length)
    for layer in config.quantization.uaq.layer_scales:
        if not 0 <= layer < architecture.num_layers:
            raise ConfigError(
                f"quantization.uaq.layer_scales.{layer}: the model's layers are numbered from 0 to "
                f"{architecture.num_layers - 1}"
            )
    if config.quantization.format == "fp8-block":
        try:
            architecture.check_blocks(config.rollout.server.tensor_parallel_size)
        except ArchitectureError as error:
            raise ConfigError(f"quantization.format=fp8-block: {error}") from None
    return architecture


def _validate_critic(config: Config, policy: Architecture, rows: list[int]) -> None:
    """`rows` are the completions of a step, in each stage."""
    critic = config.critic
    layout = critic.layout(config.learner)
    if layout.world_size != config.learner.world_size:
        raise ConfigError(
            f"critic.tensor_parallel_size={layout.tensor_parallel_size}: with "
            f"{layout.pipeline_parallel_size} pipeline stages it does not divide the policy's "
            f"{config.learner.world_size} ranks"
        )
    parts = critic.optimizer.minibatches_per_step * layout.data_parallel_size
    uneven = next((count for count in rows if count % parts), None)
    if uneven is not None:
        raise ConfigError(
            f"critic.optimizer.minibatches_per_step={critic.optimizer.minibatches_per_step}: a "
            f"step's {uneven} completions do not divide into minibatches x "
            f"{layout.data_parallel_size} data-parallel ranks of the critic"
        )
    directory = Path(critic.model or config.model)
    try:
        architecture = Architecture.from_directory(directory)
        architecture.check_layout(
            layout.tensor_parallel_size,
            layout.pipeline_parallel_size,
            layout.virtual_pipeline_parallel_size,
            layout.layers_in_last_pipeline_stage,
        )
    except ArchitectureError as error:
        raise ConfigError(f"critic: {error}") from None
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"critic.model={directory}: has no .safetensors file")
    if architecture.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"critic.model={directory}: has {architecture.vocab_size} tokens, the policy "
            f"{policy.vocab_size}; both must read the same"
        )


def _plain(value: str) -> str | None:
    return None if value in ("null", "none", "None") else value


def _suggestion(path: str, tree: dict[str, Any]) -> str:
    """`; did you mean ...?` with the closest field names, or nothing."""
    fields = list(_leaves(tree))
    leaf = path.rpartition(".")[2]
    close = [name for name in fields if name.rpartition(".")[2] == leaf]
    close = close or difflib.get_close_matches(path, fields, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every field of a configuration's nested dicts, as it is named in `field=value`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and f"{prefix}{name}" not in _FREE_FORM
        found |= _leaves(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found
