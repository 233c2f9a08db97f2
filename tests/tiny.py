"""Tiny random models as Hugging Face directories."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.quantization.smoothing import Maxima, Smoothing

ARCHITECTURES: tuple[Family, ...] = ("qwen2", "qwen3", "qwen3_moe", "llama")
HYBRIDS: tuple[Family, ...] = ("qwen3_5_text", "qwen3_5_moe_text")
VOCAB_SIZE = 256
EOS_TOKEN_ID = 1
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
HYBRID = {  # three layers of linear attention to one of attention; all sizes differ
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],  # of half the rotated channels; all are one in a text
        "mrope_interleaved": True,
    },
}
FAMILY_FIELDS: dict[Family, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 80},
}
# All widths differ. Four ranks share two key-value heads, and no layout divides the vocabulary.
UNEVEN: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 144,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
# Layers that are fused in a server's rank need whole blocks of 128.
UNEVEN_BLOCKS = UNEVEN | {
    "hidden_size": 96,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def random_model(
    architecture: Family = "qwen2",
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **dims: Any,
) -> Any:
    """Return a tiny causal language model of transformers.

    The standard deviation of 0.1 is large enough for the model to prefer some tokens. Biases and
    norms are random too, so that a test notices a missing one; decays of linear attention are
    fast and slow. `dims` override fields of the architecture's transformers config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
        **FAMILY_FIELDS.get(architecture, {}),
        **dims,
    }
    config = AutoConfig.for_model(architecture, **fields)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            is_norm = name.endswith("norm.weight")
            if name.startswith("model.") and architecture in ("qwen3_5_text", "qwen3_5_moe_text"):
                is_norm = name.endswith("linear_attn.norm.weight")  # others multiply by 1 + weight
                scale, shift = {"A_log": (10, 1), "dt_bias": (10, -2)}.get(
                    name.split(".")[-1], (1, 0)
                )
                scale = 4 if name.endswith("conv1d.weight") else scale
                noise = noise * scale + shift
            parameter.copy_(noise + 1 if is_norm else noise)
    return model


def logits(model: Any) -> Tensor:
    tokens = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


@torch.no_grad()
def apply(model: Any, transform: Callable[[str, Tensor], Tensor]) -> None:
    """Rewrite the weights of a transformers model, by their names in a checkpoint."""
    from qurl_megatron.model.transformers_model import checkpoint_tensors

    for name, weight in checkpoint_tensors(model):
        weight.copy_(transform(name, weight))


def random_smoothing(architecture: Architecture) -> Smoothing:
    """Return the scales of a model in which some channels stand out."""
    maxima = Maxima(architecture, torch.device("cpu"))
    noise = torch.randn(maxima.values.shape, generator=torch.Generator().manual_seed(0))
    maxima.values.copy_(noise.exp())
    return maxima.smoothing(0.5)


def build_tiny_model(directory: Path, architecture: Family = "qwen2", **settings: Any) -> Path:
    """Write config.json, model.safetensors and a tokenizer of characters; return `directory`.

    `settings` are those of `random_model`.
    """
    model = random_model(architecture, **settings)
    model.save_pretrained(directory)
    _build_tokenizer(model.config.vocab_size).save_pretrained(directory)
    return directory


def build_published_model(directory: Path, architecture: Family, **settings: Any) -> Path:
    """Write a hybrid as Qwen publishes one: a model of text and images, with a head for drafts.

    Weights of images and drafts are in name only. The experts of a layer are in two tensors.
    """
    from safetensors.torch import save_file

    model = random_model(architecture, **settings)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == "lm_head.weight")
    }
    tensors["model.visual.pos_embed.weight"] = torch.ones(4, 6, dtype=model.dtype)
    tensors["mtp.norm.weight"] = torch.ones(4, dtype=model.dtype)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    text = {**model.config.to_dict(), "full_attention_interval": 4, "mamba_ssm_dtype": "float32"}
    config = {
        "architectures": [type(model).__name__.replace("CausalLM", "ConditionalGeneration")],
        "model_type": architecture.removesuffix("_text"),
        "tie_word_embeddings": model.config.tie_word_embeddings,
        "text_config": text,
        "vision_config": {"model_type": architecture.replace("text", "vision")},
    }
    (directory / "config.json").write_text(json.dumps(config))
    _build_tokenizer(model.config.vocab_size).save_pretrained(directory)
    return directory


def build_fp8_model(directory: Path, architecture: Family, **settings: Any) -> tuple[Path, Path]:
    """Write a model with random weights in FP8 as Qwen publishes one, and what SGLang reads there.

    Sizes need not be multiples of a block's.
    """
    from safetensors.torch import load_file, save_file
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    in_fp8, in_bf16 = (
        build_tiny_model(directory / name, architecture, **settings) for name in ("fp8", "bf16")
    )
    tensors = load_file(in_fp8 / "model.safetensors")
    read = dict(tensors)
    torch.manual_seed(0)
    for name, tensor in read.items():
        if not name.endswith("_proj.weight"):
            continue
        codes = torch.randn(tensor.shape).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) * 0.2
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales.to(tensor.dtype)
        read[name] = block_quant_dequant(codes, scales.to(tensor.dtype), [128, 128], tensor.dtype)
    save_file(tensors, in_fp8 / "model.safetensors", {"format": "pt"})
    save_file(read, in_bf16 / "model.safetensors", {"format": "pt"})
    config = json.loads((in_fp8 / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (in_fp8 / "config.json").write_text(json.dumps(config))
    return in_fp8, in_bf16


def quantized(
    model_dir: Path,
    weight_format: str,
    transform: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    kept: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the tensors to publish from a directory, quantized without any parallel layout.

    The layers named in `kept` stay in BF16.
    """
    from qurl_megatron.model.huggingface import Weights
    from qurl_megatron.quantization import quantize
    from qurl_megatron.quantization.rounding import write_rounded

    architecture = Architecture.from_directory(model_dir)
    weights = Weights(model_dir, architecture)
    tensors: dict[str, Tensor] = {}
    for name in weight_map.hugging_face_names(architecture):
        weight = transform(name, weights.read(name, ()).float())
        module = name.removesuffix(".weight")
        is_linear = module.partition(":")[0].endswith(("_proj", ".in_proj_qkv", ".in_proj_z"))
        if weight_format != "bf16" and is_linear and module not in kept:
            codes = quantize.quantize(weight, weight_format)
            tensors[name] = codes.codes
            tensors[quantize.scale_name(name, weight_format)] = quantize.engine_scale(codes)
        else:
            dtype = torch.float32 if name.endswith(".A_log") else torch.bfloat16
            tensors[name] = torch.empty(weight.shape, dtype=dtype)
            write_rounded(tensors[name], weight, name, "unbiased")
    return tensors


def _build_tokenizer(vocab_size: int) -> Any:
    """Build a tokenizer with one token per character.

    Its vocabulary is `<pad>`, `<eos>`, printable ASCII and newline, then unused tokens. It is a
    byte-level BPE without merges, because transformers loads every `qwen2` directory as one,
    regardless of its tokenizer.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # space, newline
    words = ["<pad>", "<eos>", *characters]
    words += [f"<unused{index}>" for index in range(vocab_size - len(words))]
    vocabulary = {word: index for index, word in enumerate(words[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def write_7b(directory: Path) -> None:
    """Write the config.json of a model of the size of Qwen2.5-7B."""
    from transformers import Qwen2Config

    model = Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, dtype="bfloat16",
    )  # fmt: skip
    model.architectures = ["Qwen2ForCausalLM"]
    model.save_pretrained(directory)
