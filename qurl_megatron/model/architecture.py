"""What a Hugging Face directory says of its model's shape, read once and checked.

Everything that builds, plans or reshards a model takes an `Architecture`; nothing else reads
`config.json`. Both spellings are understood: transformers 5 (`rope_parameters`, `dtype`) and
earlier (`rope_theta`, `rope_scaling`, `torch_dtype`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["qwen2", "qwen3", "llama"]


class ArchitectureError(ValueError):
    """A model directory or layout that cannot be used; the text is the one line a user sees."""


@dataclass(frozen=True)
class _FamilyTraits:
    family: Family
    qkv_bias: bool
    qk_norm: bool


# The table to extend for a new dense architecture; its weights must fit `weight_map.RULES`.
SUPPORTED_ARCHITECTURES: dict[str, _FamilyTraits] = {
    "Qwen2ForCausalLM": _FamilyTraits("qwen2", qkv_bias=True, qk_norm=False),
    "Qwen3ForCausalLM": _FamilyTraits("qwen3", qkv_bias=False, qk_norm=True),
    "LlamaForCausalLM": _FamilyTraits("llama", qkv_bias=False, qk_norm=False),
}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """The frequency scaling of Llama 3.1 and later; fields as in `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """A dense decoder-only transformer: RMSNorm, rotary positions, grouped queries, SwiGLU."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding as stored, at least the tokenizer's size
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # of generation_config.json where there is one

    @classmethod
    def from_directory(cls, path: str | Path) -> Architecture:
        """Read `path/config.json`.

        Raises:
            ArchitectureError: the directory or file is missing, the architecture is not in
                `SUPPORTED_ARCHITECTURES`, or it uses something the learner does not have.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ArchitectureError(
                f"model directory '{directory}' does not exist; give a Hugging Face directory "
                "with config.json, tokenizer and safetensors"
            )
        config_file = directory / "config.json"
        if not config_file.is_file():
            raise ArchitectureError(
                f"'{directory}' has no config.json; give a Hugging Face model directory"
            )
        config = _read_json(config_file)

        def field(name: str) -> Any:
            if config.get(name) is None:
                raise ArchitectureError(f"{config_file} has no '{name}'")
            return config[name]

        names = config.get("architectures") or ["(none)"]
        traits = SUPPORTED_ARCHITECTURES.get(names[0])
        if traits is None:
            raise ArchitectureError(
                f"{config_file}: architecture '{names[0]}' is not supported; supported are "
                f"{', '.join(SUPPORTED_ARCHITECTURES)} "
                "(qurl_megatron.model.architecture.SUPPORTED_ARCHITECTURES is the table to extend)"
            )
        for name in ("attention_bias", "mlp_bias"):
            if config.get(name):
                raise ArchitectureError(
                    f"{config_file}: '{name}' true is not supported, only false"
                )
        if config.get("hidden_act", "silu") != "silu":
            raise ArchitectureError(
                f"{config_file}: hidden_act '{config['hidden_act']}' is not supported, only 'silu'"
            )
        num_layers = field("num_hidden_layers")
        if _uses_sliding_window(config, num_layers):
            raise ArchitectureError(
                f"{config_file}: sliding window attention layers are not supported; "
                "only full attention is (use_sliding_window false)"
            )
        rope_theta, rope_scaling = _rope(config, config_file)
        num_heads = field("num_attention_heads")
        hidden_size = field("hidden_size")
        return cls(
            family=traits.family,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=field("intermediate_size"),
            num_attention_heads=num_heads,
            num_key_value_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            vocab_size=field("vocab_size"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=traits.qkv_bias,
            qk_norm=traits.qk_norm,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=field("max_position_embeddings"),
            eos_token_ids=_eos_token_ids(config, directory / "generation_config.json"),
        )

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Embedding rows with padding: the smallest multiple of `tensor_parallel_size`.

        Megatron's habit of 128 rows a rank buys nothing here, since published vocabularies are
        already multiples of 64. Padding rows are zero and never take part in a softmax.
        """
        return -(-self.vocab_size // tensor_parallel_size) * tensor_parallel_size

    def check_layout(
        self,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        virtual_pipeline_parallel_size: int = 1,
        layers_in_last_pipeline_stage: int | None = None,
    ) -> None:
        """Raise `ArchitectureError` if the model does not divide over these ranks."""
        # Ranks may share a key-value head, but not one and a half of them.
        groups = self.num_key_value_heads
        shares_heads = tensor_parallel_size > groups and tensor_parallel_size % groups == 0
        for what, number, divides in (
            ("attention heads", self.num_attention_heads, True),
            ("key-value heads", groups, not shares_heads),
            ("intermediate channels", self.intermediate_size, True),
        ):
            if divides and (tensor_parallel_size < 1 or number % tensor_parallel_size):
                raise ArchitectureError(
                    f"{number} {what} do not divide by "
                    f"tensor_parallel_size={tensor_parallel_size}; "
                    f"sizes that divide them: {_divisors(number)}"
                )
        self._check_stages(
            pipeline_parallel_size, virtual_pipeline_parallel_size, layers_in_last_pipeline_stage
        )
        rows = self.padded_vocab_size(tensor_parallel_size) // tensor_parallel_size
        if rows * (tensor_parallel_size - 1) >= self.vocab_size:
            raise ArchitectureError(
                f"a vocabulary of {self.vocab_size} tokens leaves a rank of "
                f"tensor_parallel_size={tensor_parallel_size} without any; use fewer ranks"
            )

    def check_blocks(self, tensor_parallel_size: int = 1) -> None:
        """Raise `ArchitectureError` if servers cannot hold this model in blocks of 128 x 128.

        SGLang fuses q, k, v and gate, up, and cuts layers over its ranks, between whole blocks.
        """
        if self.family == "llama":
            raise ArchitectureError(
                "SGLang's Llama looks for the scales of blocks under another name and loads none; "
                "use format fp8, whose scales are a channel's"
            )
        kv_heads = max(1, self.num_key_value_heads // tensor_parallel_size)
        for what, width in (
            ("query", self.num_attention_heads // tensor_parallel_size * self.head_dim),
            ("key-value", kv_heads * self.head_dim),
            ("intermediate", self.intermediate_size // tensor_parallel_size),
        ):
            if width % 128:
                raise ArchitectureError(
                    f"blocks are 128 wide, but one of {tensor_parallel_size} server ranks has "
                    f"{width} {what} channels; use format fp8, whose scales are a channel's"
                )

    def _check_stages(self, stages: int, virtual_stages: int, in_last: int | None) -> None:
        if virtual_stages > 1 and stages == 1:
            raise ArchitectureError(
                f"virtual_pipeline_parallel_size={virtual_stages} cuts pipeline stages, and "
                "pipeline_parallel_size=1 has none; leave it at 1"
            )
        if in_last is None:
            if stages < 1 or self.num_layers % stages:
                raise ArchitectureError(
                    f"{self.num_layers} layers do not divide by pipeline_parallel_size={stages}; "
                    f"sizes that divide them: {_divisors(self.num_layers)}; or set "
                    "layers_in_last_pipeline_stage"
                )
            per_stage = {self.num_layers // stages}
        else:
            others = self.num_layers - in_last
            if stages == 1 or others <= 0 or others % (stages - 1):
                raise ArchitectureError(
                    f"layers_in_last_pipeline_stage={in_last} of {self.num_layers} leaves "
                    f"{others} layers, which do not divide over the other {stages - 1} of "
                    f"pipeline_parallel_size={stages}"
                )
            per_stage = {others // (stages - 1), in_last}
        for layers in per_stage:
            if layers % virtual_stages:
                raise ArchitectureError(
                    f"virtual_pipeline_parallel_size={virtual_stages} does not divide a stage's "
                    f"{layers} layers; sizes that do: {_divisors(layers)}"
                )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ArchitectureError(f"{file} is not JSON: {error}") from None


def _uses_sliding_window(config: dict[str, Any], num_layers: int) -> bool:
    """A window written in config.json counts only where a layer uses it, as in transformers."""
    if config.get("layer_types") is not None:
        return "sliding_attention" in config["layer_types"]
    return bool(
        config.get("use_sliding_window")
        and config.get("sliding_window") is not None
        and config.get("max_window_layers", 0) < num_layers
    )


def _rope(config: dict[str, Any], file: Path) -> tuple[float, Llama3RopeScaling | None]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ArchitectureError(
            f"{file}: rope scaling '{kind}' is not supported; 'default' and 'llama3' are"
        )
    try:
        return theta, Llama3RopeScaling(
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ArchitectureError(f"{file}: llama3 rope scaling has no {error}") from None


def _eos_token_ids(config: dict[str, Any], generation_file: Path) -> tuple[int, ...]:
    ids = config.get("eos_token_id")
    if generation_file.is_file():
        ids = _read_json(generation_file).get("eos_token_id") or ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
