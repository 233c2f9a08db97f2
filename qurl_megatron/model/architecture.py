"""The shape of a model, read from its `config.json`, and the parallel layouts it admits.

Everything that builds, plans or reshards a model takes an `Architecture`; only this module reads
the shape from `config.json`, with `delta_net` for hybrids. It accepts the spelling of transformers
5 (`rope_parameters`) and the earlier one (`rope_theta`, `rope_scaling`). Of a model of text and
images it reads the text part.

Divisibility rules live here and nowhere else: `check_layout` for the learner's ranks,
`check_server_layout` and `check_blocks` for a server's, `stage_layers` for pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qurl_megatron.model.config_json import (
    ArchitectureError,
    read_flag,
    read_json,
    read_positive,
    read_size,
)

if TYPE_CHECKING:
    from qurl_megatron.model.delta_net import DeltaNet
    from qurl_megatron.model.rope_scaling import RopeScaling

ADAPTER_CONFIG = "adapter_config.json"  # peft's
Family = Literal["qwen2", "qwen3", "qwen3_moe", "llama", "qwen3_5_text", "qwen3_5_moe_text"]


@dataclass(frozen=True)
class _FamilyTraits:
    family: Family
    qkv_bias: bool
    qk_norm: bool
    # What transformers assumes where config.json says nothing.
    key_value_heads: int | None = None  # None: as many as attention heads
    head_dim: int | None = None  # None: hidden size / attention heads
    has_experts: bool = False
    is_hybrid: bool = False  # see `DeltaNet`


# Extend this table for a new architecture. Its weights must fit `weight_map.RULES`.
SUPPORTED_ARCHITECTURES: dict[str, _FamilyTraits] = {
    "Qwen2ForCausalLM": _FamilyTraits("qwen2", qkv_bias=True, qk_norm=False, key_value_heads=32),
    "Qwen3ForCausalLM": _FamilyTraits(
        "qwen3", qkv_bias=False, qk_norm=True, key_value_heads=32, head_dim=128
    ),
    "Qwen3MoeForCausalLM": _FamilyTraits(
        "qwen3_moe", qkv_bias=False, qk_norm=True, key_value_heads=4, has_experts=True
    ),
    "LlamaForCausalLM": _FamilyTraits("llama", qkv_bias=False, qk_norm=False),
    "Qwen3_5ForCausalLM": _FamilyTraits(
        "qwen3_5_text",
        qkv_bias=False,
        qk_norm=True,
        key_value_heads=4,
        head_dim=256,
        is_hybrid=True,
    ),
    "Qwen3_5MoeForCausalLM": _FamilyTraits(
        "qwen3_5_moe_text",
        qkv_bias=False,
        qk_norm=True,
        key_value_heads=2,
        head_dim=256,
        has_experts=True,
        is_hybrid=True,
    ),
}
# Models of text and images, as Qwen3.5 and 3.6 are published, and the models of their text part.
TEXT_PARTS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


QUANTIZED = ("quantization_config", "compression_config")  # the latter is an older name


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    With experts, every layer has a router and `num_experts` SwiGLUs in place of one. Sizes are
    those of the checkpoint, before padding and tensor parallelism.
    """

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the stored embedding; the tokenizer may have fewer tokens
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int  # tokens of the longest sequence; see `_max_positions`
    eos_token_ids: tuple[int, ...]  # those of generation_config.json, then those of config.json
    num_experts: int = 0  # of each layer; 0: a dense model
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # channels of one expert; `intermediate_size` is not used then
    normalize_topk: bool = False  # the weights of a token's experts add up to 1
    shared_intermediate_size: int = 0  # channels of the expert that every token passes through
    delta_net: DeltaNet | None = None  # None: not a hybrid
    adapter_rank: int = 0  # of a learner's adapters over this model; 0: it has none

    @classmethod
    def from_directory(cls, path: str | Path) -> Architecture:
        """Read `path/config.json`.

        Raises:
            ArchitectureError: the directory or file is missing, the architecture is not in
                `SUPPORTED_ARCHITECTURES`, or the model needs a feature the learner lacks.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ArchitectureError(
                f"model directory '{directory}' does not exist; give a Hugging Face directory "
                "with config.json, tokenizer and safetensors"
            )
        file = directory / "config.json"
        if not file.is_file() and (directory / ADAPTER_CONFIG).is_file():
            base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise ArchitectureError(
                f"'{directory}' holds adapters over {base!r:.200} and no model; give that, and "
                "adapters.init=DIR adapters.rank=RANK to train them further, or merge them (peft: "
                "merge_and_unload, save_pretrained); for qurl eval, give the base and adapters=DIR"
            )
        if not file.is_file():
            raise ArchitectureError(
                f"'{directory}' has no config.json; give a Hugging Face model directory"
            )
        config = text_config(read_json(file), file)
        traits = _traits(config, file)
        num_layers = read_size(config, "num_hidden_layers", file)
        for reason in _unsupported(config, num_layers, traits):
            raise ArchitectureError(f"{file}: {reason}")
        num_heads = read_size(config, "num_attention_heads", file)
        num_key_value_heads = _key_value_heads(config, file, traits, num_heads)
        if num_heads % num_key_value_heads:
            raise ArchitectureError(
                f"{file}: {num_heads} attention heads do not divide into groups over "
                f"{num_key_value_heads} key-value heads"
            )
        hidden_size = read_size(config, "hidden_size", file)
        vocab_size = read_size(config, "vocab_size", file)
        head_dim = _head_dim(config, file, traits, hidden_size, num_heads)
        rope_theta, rope_scaling = _rope(config, file, traits)
        hybrid = None
        if traits.is_hybrid:
            from qurl_megatron.model.delta_net import DeltaNet

            hybrid = DeltaNet.read(config, num_layers, head_dim, file)
        return cls(
            family=traits.family,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=read_size(
                config,
                "intermediate_size",
                file,
                config.get("moe_intermediate_size") if traits.is_hybrid else None,
            ),
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            tie_word_embeddings=read_flag(config, "tie_word_embeddings", file),
            qkv_bias=traits.qkv_bias,
            qk_norm=traits.qk_norm,
            rms_norm_eps=read_positive(config, "rms_norm_eps", file, 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_max_positions(config, file, rope_scaling),
            eos_token_ids=_eos_token_ids(config, directory, vocab_size),
            **(_experts(config, file, traits) if traits.has_experts else {}),
            delta_net=hybrid,
        )

    @property
    def active_intermediate_size(self) -> int:
        """Intermediate channels that one token passes through in a layer."""
        if not self.num_experts:
            return self.intermediate_size
        return self.experts_per_token * self.moe_intermediate_size + self.shared_intermediate_size

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have linear attention."""
        return self.delta_net is not None

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """For every layer, whether its attention is linear."""
        return self.delta_net.layers if self.delta_net else (False,) * self.num_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention, and so with keys and values; the others have a state."""
        return self.num_layers - self.num_linear_layers

    @property
    def num_linear_layers(self) -> int:
        """Layers with linear attention."""
        return sum(self.linear_layers)

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Return the embedding rows with padding: the next multiple of `tensor_parallel_size`.

        Megatron pads to a multiple of 128 rows per rank by default. That is not needed here,
        because published vocabularies are already multiples of 64. Padding rows are zero and are
        excluded from every softmax.
        """
        return -(-self.vocab_size // tensor_parallel_size) * tensor_parallel_size

    def key_value_heads_on_rank(self, tensor_parallel_size: int) -> int:
        """Return the key-value heads that one rank holds, counting a head it shares as one."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)

    def stage_layers(
        self, pipeline_parallel_size: int, layers_in_last_pipeline_stage: int | None = None
    ) -> list[int]:
        """Return the number of layers in each pipeline stage.

        Args:
            pipeline_parallel_size: number of stages.
            layers_in_last_pipeline_stage: None if all stages have the same number.

        Raises:
            ArchitectureError: the layers do not divide over the stages.
        """
        stages, last = pipeline_parallel_size, layers_in_last_pipeline_stage
        if last is None:
            if stages < 1 or self.num_layers % stages:
                raise ArchitectureError(
                    f"{self.num_layers} layers are not divisible by "
                    f"pipeline_parallel_size={stages}; sizes that divide them: "
                    f"{_divisors(self.num_layers)}; or set layers_in_last_pipeline_stage"
                )
            return [self.num_layers // stages] * stages
        others = self.num_layers - last
        if stages == 1 or others <= 0 or others % (stages - 1):
            raise ArchitectureError(
                f"layers_in_last_pipeline_stage={last} of {self.num_layers} leaves {others} "
                f"layers, which do not divide over the other {stages - 1} of "
                f"pipeline_parallel_size={stages}"
            )
        return [others // (stages - 1)] * (stages - 1) + [last]

    def shorter_last_stage(self, pipeline_parallel_size: int) -> int | None:
        """Return the layers left for a last stage after equal stages that are rounded up.

        None if the layers divide evenly, or if none are left.
        """
        stages = pipeline_parallel_size
        last = self.num_layers - -(-self.num_layers // stages) * (stages - 1)
        return last if self.num_layers % stages and last > 0 else None

    @property
    def num_linear_weights(self) -> int:
        """Weights that one token is multiplied by in all layers, the output layer left out.

        Of the experts, only the chosen ones are counted.
        """
        query = self.num_attention_heads * self.head_dim
        key_value = 2 * self.num_key_value_heads * self.head_dim
        mlp = 3 * self.active_intermediate_size + self.num_experts  # the router's rows
        mlp += self.shared_intermediate_size > 0  # the row of its gate
        # Queries and outputs, and in a hybrid the output's gate.
        attention = (3 if self.delta_net else 2) * query + key_value
        linear = self.num_linear_layers * self.delta_net.projected if self.delta_net else 0
        channels = self.num_layers * mlp + self.num_attention_layers * attention + linear
        return self.hidden_size * channels

    def forward_flops(self, length: float, square: float | None = None) -> float:
        """Return the FLOPs of the layers in the forward pass of one sequence, attention causal.

        If `length` is the mean of several sequences, `square` is the mean of their squares.
        """
        square = length**2 if square is None else square
        attention = self.num_attention_layers * self.num_attention_heads * self.head_dim * square
        rule = self.num_linear_layers * self.delta_net.flops * length if self.delta_net else 0.0
        return 2.0 * self.num_linear_weights * length + 2.0 * attention + rule

    def check_layout(
        self,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        virtual_pipeline_parallel_size: int = 1,
        layers_in_last_pipeline_stage: int | None = None,
    ) -> None:
        """Check that the learner can divide this model over its tensor and pipeline ranks.

        Raises:
            ArchitectureError: it cannot; the message names the size and what would divide.
        """
        size = tensor_parallel_size
        self._check_divides("attention heads", self.num_attention_heads, size)
        # Several ranks may share one key-value head, but every head needs equally many ranks.
        if size <= self.num_key_value_heads or size % self.num_key_value_heads:
            self._check_divides("key-value heads", self.num_key_value_heads, size)
        if not self.num_experts:
            self._check_divides("intermediate channels", self.intermediate_size, size)
        self._check_linear_layout(size)
        virtual_stages = virtual_pipeline_parallel_size
        if virtual_stages > 1 and pipeline_parallel_size == 1:
            raise ArchitectureError(
                f"virtual_pipeline_parallel_size={virtual_stages} divides pipeline stages, and "
                "pipeline_parallel_size=1 has none; leave it at 1"
            )
        for layers in self.stage_layers(pipeline_parallel_size, layers_in_last_pipeline_stage):
            if layers % virtual_stages:
                raise ArchitectureError(
                    f"virtual_pipeline_parallel_size={virtual_stages} does not divide a stage's "
                    f"{layers} layers; sizes that divide them: {_divisors(layers)}"
                )
        rows = self.padded_vocab_size(size) // size
        if rows * (size - 1) >= self.vocab_size:
            raise ArchitectureError(
                f"a vocabulary of {self.vocab_size} tokens leaves a rank of "
                f"tensor_parallel_size={size} without any; use fewer ranks"
            )

    def _check_linear_layout(self, tensor_parallel_size: int) -> None:
        """Check that heads of linear attention, and a shared expert, divide over ranks."""
        if self.delta_net is not None:
            for unit, heads in (
                ("key", self.delta_net.key_heads),
                ("value", self.delta_net.value_heads),
            ):
                unit += " heads of linear attention"
                self._check_divides(unit, heads, tensor_parallel_size)
        unit = "channels of the shared expert"
        self._check_divides(unit, self.shared_intermediate_size, tensor_parallel_size)

    def check_expert_layout(
        self, expert_parallel_size: int, expert_tensor_parallel_size: int, stage_ranks: int
    ) -> None:
        """Check that the experts of a pipeline stage divide over its ranks.

        Args:
            expert_parallel_size: ranks that share the experts.
            expert_tensor_parallel_size: ranks that share one expert.
            stage_ranks: all ranks of a pipeline stage: tensor x context x data parallel.

        Raises:
            ArchitectureError: they do not; the message lists the sizes that would.
        """
        name, size = "expert_parallel_size", expert_parallel_size
        if not self.num_experts:
            if (size, expert_tensor_parallel_size) != (1, 1):
                raise ArchitectureError(
                    f"{name}={size} and expert_tensor_parallel_size={expert_tensor_parallel_size} "
                    "divide experts, and the model has none; leave them at 1"
                )
            return
        self._check_divides("experts", self.num_experts, size, name)
        self._check_divides(
            "channels of an expert",
            self.moe_intermediate_size,
            expert_tensor_parallel_size,
            "expert_tensor_parallel_size",
        )
        ranks = size * expert_tensor_parallel_size
        if stage_ranks % ranks:
            raise ArchitectureError(
                f"{name}={size} x expert_tensor_parallel_size={expert_tensor_parallel_size} must "
                f"divide the {stage_ranks} ranks of a pipeline stage (tensor x context x data "
                f"parallel); sizes that divide them: {_divisors(stage_ranks)}"
            )

    def check_server_layout(self, tensor_parallel_size: int, expert_parallel_size: int = 1) -> None:
        """Check that an SGLang server can divide this model over its tensor-parallel ranks.

        Whole experts are divided over `expert_parallel_size` groups of these ranks.

        Raises:
            ArchitectureError: it cannot; the message lists the sizes that would.
        """
        self._check_divides("attention heads", self.num_attention_heads, tensor_parallel_size)
        self._check_linear_layout(tensor_parallel_size)
        groups = expert_parallel_size
        if groups == 1 and not self.num_experts:
            return
        if not self.num_experts:
            raise ArchitectureError(
                f"expert_parallel_size={groups} divides experts, and this model has none; "
                "leave it at 1"
            )
        if tensor_parallel_size % groups or self.num_experts % groups:
            raise ArchitectureError(
                f"expert_parallel_size={groups} must divide tensor_parallel_size="
                f"{tensor_parallel_size} and the model's {self.num_experts} experts"
            )
        sharing = tensor_parallel_size // groups
        if self.moe_intermediate_size % sharing:
            raise ArchitectureError(
                f"{sharing} server ranks share each expert, and its {self.moe_intermediate_size} "
                f"channels are not divisible by that; with a larger expert_parallel_size fewer do"
            )

    def check_blocks(
        self, weight_format: str, tensor_parallel_size: int = 1, expert_parallel_size: int = 1
    ) -> None:
        """Check that a server can hold this model, if the format has blocks or groups.

        SGLang fuses q, k, v and gate, up, and shards layers over its ranks. It can do both only at
        block boundaries, so every width on a rank must be a multiple of the block's. Its GPU
        kernels also need whole blocks along the inputs, such as the hidden size. INT4's groups lie
        along the inputs only, and key-value channels are outputs.

        Raises:
            ArchitectureError: it cannot.
        """
        block = _BLOCK_WIDTHS.get(weight_format)
        if block is None:
            return
        is_int4 = weight_format != "fp8-block"
        if self.family == "llama" and not is_int4:
            raise ArchitectureError(
                "SGLang's Llama looks for block scales under another name and loads none; "
                "use format fp8, which has one scale per channel"
            )
        intermediate, sharing = self.intermediate_size, tensor_parallel_size
        if self.num_experts:
            intermediate, sharing = self.moe_intermediate_size, sharing // expert_parallel_size
        widths = {
            "query": self.num_attention_heads // tensor_parallel_size * self.head_dim,
            "key-value": self.key_value_heads_on_rank(tensor_parallel_size) * self.head_dim,
            "intermediate": intermediate // sharing,
            "hidden": self.hidden_size,
        }
        if self.delta_net is not None:
            widths["linear key"] = self.delta_net.keys // tensor_parallel_size
            widths["linear value"] = self.delta_net.values // tensor_parallel_size
        if self.shared_intermediate_size:
            shared = self.shared_intermediate_size // tensor_parallel_size
            widths["shared expert's intermediate"] = shared
        if is_int4:
            del widths["key-value"]
            widths.pop("linear key", None)
        for width_name, width in widths.items():
            if width % block:
                other = "format int8" if is_int4 else "format fp8"
                if block == 128 and is_int4 and not any(each % 32 for each in widths.values()):
                    other = "groups of 32, or format int8"
                raise ArchitectureError(
                    f"{'groups of int4' if is_int4 else 'blocks of fp8-block'} are {block} wide, "
                    f"but one of {tensor_parallel_size} server ranks has {width} {width_name} "
                    f"channels; use {other}, which has one scale per channel"
                )

    @staticmethod
    def _check_divides(
        unit: str, number: int, size: int, name: str = "tensor_parallel_size"
    ) -> None:
        if size < 1 or number % size:
            raise ArchitectureError(
                f"{number} {unit} are not divisible by {name}={size}; "
                f"sizes that divide them: {_divisors(number)}"
            )


_BLOCK_WIDTHS = {"fp8-block": 128, "int4": 128, "int4-g32": 32}  # of one scale, by format


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)


def trainable(directory: Path) -> Architecture:
    """Read the config.json of a model that will be trained or rewritten, not only served.

    Raises:
        ArchitectureError: as in `Architecture.from_directory`, or the model is quantized, or has
            adapters beside its weights.
    """
    architecture = Architecture.from_directory(directory)
    refuse_adapters(directory)
    file = directory / "config.json"
    config = text_config(read_json(file), file)
    field = next((name for name in QUANTIZED if name in config), None)
    if field and not fp8_block(config):
        raise ArchitectureError(
            f"'{directory}' is quantized already ({field} in its config.json), and only FP8 in "
            "blocks is read; give the directory it was made from"
        )
    return architecture


def fp8_block(config: dict[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block, if config.json describes FP8 with a scale for each.

    Qwen3's FP8 checkpoints are of this kind. None: it describes no quantization, or another.
    """
    described = config.get("quantization_config")
    if not isinstance(described, dict) or "compression_config" in config:
        return None
    kind = [described.get(name) for name in ("quant_method", "activation_scheme", "fmt")]
    block = described.get("weight_block_size")
    if kind[0] != "fp8" or kind[1] != "dynamic" or kind[2] not in (None, "e4m3"):
        return None
    if not isinstance(block, list) or len(block) != 2:
        return None
    return (block[0], block[1]) if all(type(size) is int and size > 0 for size in block) else None


def refuse_adapters(directory: Path) -> None:
    """Refuse a model with adapters beside its weights, which transformers would load too.

    Raises:
        ArchitectureError: it has a file of adapters.
    """
    files = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
    if found := next((name for name in files if (directory / name).exists()), None):
        raise ArchitectureError(
            f"'{directory}' has {found} beside its weights, which do not have these adapters in "
            "them; merge them (peft: merge_and_unload), or remove their files"
        )


def text_config(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return config.json as that of a text-only model, which all readers take as the same model.

    A quantization that is null is left out. For a model of text and images it is `text_config`,
    with the fields that are only beside it. For a hybrid it also has those of
    `delta_net.with_fields`.

    Raises:
        ArchitectureError: it contradicts itself.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name in TEXT_PARTS:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise ArchitectureError(f"{file}: {name} without an object 'text_config'")
        beside: dict[str, Any] = {
            field: config[field]
            for field in ("dtype", "torch_dtype", "tie_word_embeddings", *QUANTIZED)
            if field in config
        }
        tied = "tie_word_embeddings"
        if text.get(tied, beside.get(tied)) != beside.get(tied, text.get(tied)):
            raise ArchitectureError(
                f"{file}: {tied} is {beside[tied]}, and {text[tied]} in text_config"
            )
        name = TEXT_PARTS[name]
        config = {**beside, **text, "architectures": [name]}
    for field in QUANTIZED:  # some tools write null
        if config.get(field, field) is None:
            config = {name: value for name, value in config.items() if name != field}
    traits = SUPPORTED_ARCHITECTURES.get(str(name))
    if traits is None or not traits.is_hybrid:
        return config
    from qurl_megatron.model import delta_net

    return delta_net.with_fields(config)


def _traits(config: dict[str, Any], file: Path) -> _FamilyTraits:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else "(none)"
    traits = SUPPORTED_ARCHITECTURES.get(name) if isinstance(name, str) else None
    if traits is None:
        raise ArchitectureError(
            f"{file}: architecture '{name}' is not supported; supported are "
            f"{', '.join([*SUPPORTED_ARCHITECTURES, *TEXT_PARTS])} "
            "(to add one, extend qurl_megatron.model.architecture.SUPPORTED_ARCHITECTURES)"
        )
    if config.get("model_type", traits.family) != traits.family:
        raise ArchitectureError(
            f"{file}: model_type '{config['model_type']}' is not that of {name}, "
            f"'{traits.family}'; transformers and SGLang would build different models"
        )
    return traits


def _unsupported(config: dict[str, Any], num_layers: int, traits: _FamilyTraits) -> Iterator[str]:
    """Yield what the model needs and the learner, or the server, does not compute."""
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            yield f"'{name}' must be false; true is not supported"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act '{config['hidden_act']}' is not supported, only 'silu'"
    layer_types = config.get("layer_types")
    if layer_types is not None:
        uses_window = "sliding_attention" in layer_types
    else:  # by the rules of transformers
        uses_window = bool(
            config.get("use_sliding_window")
            and config.get("sliding_window") is not None
            and (config.get("max_window_layers") or 0) < num_layers
        )
    if uses_window:
        yield (
            "sliding window attention is not supported; only full attention is "
            "(use_sliding_window false)"
        )
    if traits.is_hybrid:
        from qurl_megatron.model import delta_net

        yield from delta_net.unsupported(config)
    elif layer_types is not None and layer_types != ["full_attention"] * num_layers:
        yield f"'layer_types' must be 'full_attention' for each of the {num_layers} layers"
    if not traits.has_experts:
        return
    if not traits.is_hybrid and config.get("shared_expert_intermediate_size"):
        yield "shared experts (shared_expert_intermediate_size) are not supported"
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        yield "every layer must have experts (decoder_sparse_step 1, mlp_only_layers empty)"
    if config.get("tie_word_embeddings") is True:
        yield (
            "tie_word_embeddings is true; with experts it must be false, because SGLang's models "
            "with experts have an output layer of their own"
        )


def _experts(config: dict[str, Any], file: Path, traits: _FamilyTraits) -> dict[str, Any]:
    """Return the fields of `Architecture` that describe the experts.

    Raises:
        ArchitectureError: a token passes through more experts than there are, or the router would
            not be trained.
    """
    shared = (
        read_size(config, "shared_expert_intermediate_size", file, 512) if traits.is_hybrid else 0
    )
    # transformers 5 writes the second name.
    num_experts = read_size(config, "num_experts", file, config.get("num_local_experts"))
    experts_per_token = read_size(config, "num_experts_per_tok", file)
    normalize_topk = traits.is_hybrid or read_flag(config, "norm_topk_prob", file)
    if experts_per_token > num_experts:
        raise ArchitectureError(
            f"{file}: num_experts_per_tok is {experts_per_token}, but num_experts {num_experts}"
        )
    if experts_per_token == 1 and normalize_topk:
        raise ArchitectureError(
            f"{file}: norm_topk_prob with num_experts_per_tok 1 gives every expert the weight 1, "
            "and the router no gradient; it is not supported"
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "moe_intermediate_size": read_size(config, "moe_intermediate_size", file),
        "normalize_topk": normalize_topk,
        "shared_intermediate_size": shared,
    }


def _key_value_heads(
    config: dict[str, Any], file: Path, traits: _FamilyTraits, num_heads: int
) -> int:
    """Return the number of key-value heads, by the rules of transformers."""
    name = "num_key_value_heads"
    if name not in config:
        return traits.key_value_heads or num_heads
    if config[name] is None and not (traits.has_experts or traits.is_hybrid):
        return num_heads
    return read_size(config, name, file)


def _head_dim(
    config: dict[str, Any], file: Path, traits: _FamilyTraits, hidden_size: int, num_heads: int
) -> int:
    """Return the channels of an attention head, by the rules of transformers."""
    if config.get("head_dim", 0) is None and traits.family != "llama":
        # transformers then has no number: it refuses the file, or builds no attention.
        raise ArchitectureError(f"{file}: 'head_dim' is null; give the number, or leave it out")
    head_dim = read_size(config, "head_dim", file, traits.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ArchitectureError(
            f"{file}: attention heads of {head_dim} channels; rotary positions need an even number"
        )
    return head_dim


def _max_positions(config: dict[str, Any], file: Path, scaling: RopeScaling | None) -> int:
    """Return the tokens of the longest sequence.

    With linear scaling `max_position_embeddings` is the length before it, as SGLang takes it. With
    YaRN some files have the length before it there, some the one after it, and Qwen3's neither.
    """
    positions = read_size(config, "max_position_embeddings", file)
    return scaling.longest(positions) if scaling else positions


def _rope(
    config: dict[str, Any], file: Path, traits: _FamilyTraits
) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and scaling, from the spelling of transformers 5 or an earlier one.

    transformers and SGLang read the two spellings with different precedence, so a file that has
    both must say the same in both. Sections for several kinds of positions (mrope) are for images:
    a text token has the same position in all of them.
    """
    given = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(fields, dict) for fields in given):
        raise ArchitectureError(f"{file}: rope_parameters and rope_scaling must be objects")
    named = [fields for fields in given if fields]
    thetas = {
        read_positive(fields, "rope_theta", file, 10000.0)
        for fields in [*named, config]
        if "rope_theta" in fields
    }
    if len(thetas) > 1:
        raise ArchitectureError(f"{file}: 'rope_theta' is given as {sorted(thetas)}; give one")
    theta = thetas.pop() if thetas else 10000.0
    if traits.is_hybrid:
        others = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
        named = [{key: fields[key] for key in fields if key not in others} for fields in named]
    elif config.get("partial_rotary_factor") not in (None, 1):
        raise ArchitectureError(f"{file}: partial_rotary_factor is not supported, only 1")
    scalings = [_rope_scaling(fields, file) for fields in named] or [None]
    if any(scaling != scalings[0] for scaling in scalings):
        raise ArchitectureError(f"{file}: rope_parameters and rope_scaling differ; give one")
    if traits.is_hybrid and scalings[0]:
        raise ArchitectureError(f"{file}: rope scaling is not supported in a hybrid")
    name = "original_max_position_embeddings"
    original = getattr(scalings[0], name, None)
    if original and config.get(name, original) != original:  # transformers takes that
        raise ArchitectureError(
            f"{file}: {name} is {config[name]!r:.80} beside the rope scaling, which says {original}"
        )
    return theta, scalings[0]


def _rope_scaling(fields: dict[str, Any], file: Path) -> RopeScaling | None:
    """Return the scaling that one object of config.json describes; None: plain rotary positions.

    Raises:
        ArchitectureError: see `rope_scaling.read_scaling`.
    """
    kinds = ("rope_type", "type")
    others = fields.keys() - {*kinds, "rope_theta"}
    is_plain = all(fields.get(kind) in (None, "", "default") for kind in kinds)
    if is_plain and all(fields[name] is None for name in others):
        return None
    from qurl_megatron.model.rope_scaling import read_scaling

    return read_scaling(fields, file)


def _eos_token_ids(config: dict[str, Any], directory: Path, vocab_size: int) -> tuple[int, ...]:
    given = {directory / "config.json": config}
    generation_file = directory / "generation_config.json"
    if generation_file.is_file():
        given = {generation_file: read_json(generation_file), **given}
    tokens: dict[int, None] = {}
    for file, fields in given.items():
        ids = fields.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ArchitectureError(
                    f"{file}: eos_token_id {token!r:.80} is not a token of the vocabulary, 0 to "
                    f"{vocab_size - 1}"
                )
            tokens[token] = None
    return tuple(tokens)
