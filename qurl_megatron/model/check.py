"""Check a model directory before anything starts.

Of the weights only headers are read, so 32 billion parameters in 17 files take a fraction of a
second. The values of a small model are read too. In a larger one NaN and infinity are found by the
learner rank that loads them, while the servers start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import Weights, read_config, stored_dtype

MAX_BYTES_READ = 1024**3  # largest model whose values are read: about a second from a page cache


def check_model(directory: Path) -> Weights:
    """Check config.json and the weights of a model that will be trained or rewritten.

    Raises:
        ArchitectureError: one line: the architecture is not supported, the model is quantized, a
            file is missing or broken, a tensor is missing, unknown or misshapen, or holds NaN.
    """
    architecture = Architecture.from_directory(directory)
    if "quantization_config" in read_config(directory):
        raise ArchitectureError(
            f"'{directory}' is quantized already (quantization_config in its config.json); give "
            "the directory it was made from"
        )
    stored_dtype(directory)
    weights = Weights(directory, architecture)
    if weights.num_bytes <= MAX_BYTES_READ:
        for name in weight_map.hugging_face_names(architecture):
            weights.read(name, ())
    return weights


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of a model directory.

    Raises:
        ArchitectureError: one line: transformers cannot load it, or it has tokens that the model's
            embedding lacks.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        token_ids = tokenizer("1")["input_ids"]
        largest = max(tokenizer.get_vocab().values(), default=0)
    except Exception as error:  # transformers and its parsers raise any type for a broken file
        reason = " ".join(str(error).split())
        raise ArchitectureError(
            f"'{directory}': its tokenizer cannot be loaded ({type(error).__name__}: {reason:.200})"
        ) from None
    if not token_ids:
        raise ArchitectureError(f"'{directory}': its tokenizer turns the text '1' into no token")
    vocab_size = Architecture.from_directory(directory).vocab_size
    if largest >= vocab_size:
        raise ArchitectureError(
            f"'{directory}': its tokenizer has token {largest}, but the model's vocabulary has "
            f"{vocab_size} tokens, from 0; they do not belong together"
        )
    return tokenizer
