"""Hugging Face directories rewritten tensor by tensor: quantized, or scaled by UAQ and back.

A directory appears under its name only when it is whole. Until then it is `<name>.partial`, written
one safetensors file at a time, each of which appears by a rename; a second call goes on after the
files that are there. In memory is one piece of the source at a time, as it is written: a file, or
what a larger file is cut into.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qurl_megatron.config.schema import UaqConfig, WeightFormat
from qurl_megatron.files import partial_of, rename_whole, write_whole
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import (
    Progress,
    Weights,
    copy_beside_weights,
    read_config,
    stored_dtype,
    write_index,
)
from qurl_megatron.quantization import quantize, uaq

JOB_FILE = "job.json"
UAQ_FIELD = "qurl_uaq"  # of config.json: the scaling a directory carries
PROBE_TOKENS = 64
PIECE_BYTES = 8 * 1024**3  # in float32; published models come in files of 4 to 5 GB of BF16

Rewrite = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
"""(name, tensor as stored) -> what is written for it."""


class OfflineError(ValueError):
    """What cannot be rewritten, or not to there; the text is the one line a user sees."""


@dataclass(frozen=True)
class Invariance:
    """How far a scaled model's logits are from the unscaled one's, over random tokens."""

    largest_logit: float
    float32_difference: float  # largest, of weights scaled in float32: rounding only
    stored_difference: float  # largest, of weights rounded to the dtype they are stored in


def quantize_directory(
    source: Path, destination: Path, weight_format: WeightFormat, progress: Progress
) -> None:
    """Write a directory an SGLang server with this package serves, quantized as a publish is.

    Linear layers inside blocks become codes and scales, everything else BF16. An `fp8-block`
    directory is described as SGLang's own `fp8` method reads it.

    Raises:
        OfflineError, ArchitectureError: the source or the destination does not fit.
        quantize.NonFiniteWeight: a weight holds NaN or infinity; the message names it.
    """

    def rewrite(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if weight_format == "bf16" or not weight_map.find_hugging_face(name)[0].quantized:
            yield name, tensor.to(torch.bfloat16)
            return
        with quantize.naming(name):
            quantized = quantize.quantize(tensor, weight_format)
        yield name, quantized.codes
        yield quantize.scale_name(name, weight_format), quantize.engine_scale(quantized)

    changes: dict[str, Any] = {"dtype": "bfloat16"}
    if weight_format == "fp8-block":
        Architecture.from_directory(source).check_blocks()
        changes["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    elif weight_format != "bf16":
        changes["quantization_config"] = {"quant_method": quantize.ENGINE_METHODS[weight_format]}
    job = {"quantize": weight_format}
    _rewrite(source, destination, rewrite, changes, job, progress)


def scale_directory(
    source: Path, destination: Path, config: UaqConfig, progress: Progress
) -> Invariance:
    """Write a copy scaled by UAQ (QuRL Eq. 11), in the dtype it is stored in, and compare logits.

    Raises:
        OfflineError, ArchitectureError: the source or the destination does not fit.
    """
    if UAQ_FIELD in read_config(source):
        raise OfflineError(f"{source} is scaled already ({UAQ_FIELD} in its config.json); undo it")
    changes = {UAQ_FIELD: dataclasses.asdict(config)}
    return _scale(source, destination, uaq.transform(config), changes, progress)


def unscale_directory(source: Path, destination: Path, progress: Progress) -> Invariance:
    """Undo `scale_directory`: exact for powers of two, within a rounding of the dtype otherwise.

    Raises:
        OfflineError, ArchitectureError: the source or the destination does not fit.
    """
    fields = read_config(source).get(UAQ_FIELD)
    if fields is None:
        raise OfflineError(f"{source} is not scaled: its config.json has no {UAQ_FIELD}")
    layer_scales = {int(layer): scale for layer, scale in fields["layer_scales"].items()}
    config = UaqConfig(**{**fields, "layer_scales": layer_scales})
    return _scale(source, destination, uaq.inverse(config), {UAQ_FIELD: None}, progress)


def _scale(
    source: Path,
    destination: Path,
    transform: uaq.Transform,
    changes: dict[str, Any],
    progress: Progress,
) -> Invariance:
    def rewrite(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, transform(name, tensor.float()).to(tensor.dtype)

    _rewrite(source, destination, rewrite, changes, {"uaq": changes[UAQ_FIELD]}, progress)
    return _compare_logits(source, transform)


@torch.no_grad()
def _compare_logits(source: Path, transform: uaq.Transform) -> Invariance:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    stored = stored_dtype(source)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, PROBE_TOKENS), generator=generator)
    before = model(tokens).logits
    for name, parameter in model.named_parameters():
        parameter.copy_(transform(name, parameter))
    exact = model(tokens).logits
    for parameter in model.parameters():
        parameter.copy_(parameter.to(stored))
    rounded = model(tokens).logits
    return Invariance(
        float(before.abs().max()),
        float((exact - before).abs().max()),
        float((rounded - before).abs().max()),
    )


def _rewrite(
    source: Path,
    destination: Path,
    rewrite: Rewrite,
    changes: dict[str, Any],
    job: dict[str, Any],
    progress: Progress,
) -> None:
    """Rewrite every tensor; `changes` are made to config.json, None removes a field."""
    architecture = Architecture.from_directory(source)
    if "quantization_config" in read_config(source):
        raise OfflineError(f"{source} is quantized already; give the directory it was made from")
    files = Weights(source, architecture).files  # refuses what is missing, unknown or misshapen
    if destination.exists():
        raise OfflineError(f"{destination} exists; choose another directory")
    partial = partial_of(destination)
    _begin(partial, {"source": _fingerprint(source, files), **job})

    known = weight_map.hugging_face_names(architecture)
    pieces = list(_pieces(source, files))
    written: dict[str, str] = {}
    done_bytes = 0
    for piece in pieces:
        if not (partial / piece.target).exists():
            with safe_open(source / piece.file, "pt") as opened:
                tensors = {
                    new_name: new_tensor.contiguous()
                    for name in piece.names
                    for new_name, new_tensor in (
                        rewrite(name, opened.get_tensor(name))
                        if name in known
                        else [(name, opened.get_tensor(name))]
                    )
                }
            write_whole(partial / piece.target, functools.partial(_save, tensors))
        with safe_open(partial / piece.target, "pt") as opened:
            written |= dict.fromkeys(opened.keys(), piece.target)
        done_bytes += piece.num_bytes
        progress(done_bytes, sum(piece.num_bytes for piece in pieces))

    copy_beside_weights(source, partial)
    if len(pieces) > 1:
        write_index(partial, written)
    removed = {name for name, value in changes.items() if value is None}
    removed |= {"torch_dtype"} if "dtype" in changes else set()  # its older spelling
    config = {**read_config(source), **changes}
    config = {name: value for name, value in config.items() if name not in removed}
    write_whole(partial / "config.json", json.dumps(config, indent=2) + "\n")
    (partial / JOB_FILE).unlink()
    rename_whole(partial, destination)


@dataclass(frozen=True)
class _Piece:
    """Tensors of one source file that are held in memory together, and written as one file."""

    target: str
    file: str
    names: list[str]
    num_bytes: int  # in float32, as they are rewritten


def _pieces(source: Path, files: list[str]) -> Iterator[_Piece]:
    """Every source file as one piece, or cut into several of at most PIECE_BYTES each."""
    for file in files:
        groups: list[tuple[list[str], int]] = [([], 0)]
        with safe_open(source / file, "pt") as opened:
            for name in opened.keys():
                num_bytes = 4 * math.prod(opened.get_slice(name).get_shape())
                names, size = groups[-1]
                if names and size + num_bytes > PIECE_BYTES:
                    names, size = [], 0
                    groups.append((names, size))
                names.append(name)
                groups[-1] = names, size + num_bytes
        for number, (names, num_bytes) in enumerate(groups, start=1):
            target = file
            if len(groups) > 1:
                target = f"{file.removesuffix('.safetensors')}-{number:05}.safetensors"
            yield _Piece(target, file, names, num_bytes)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})


def _begin(partial: Path, job: dict[str, Any]) -> None:
    """Make the unfinished directory, or go on with one of the same job."""
    job = json.loads(json.dumps(job))
    if partial.exists():
        found = partial / JOB_FILE
        if not found.exists() or json.loads(found.read_text()) != job:
            raise OfflineError(f"{partial} was left by another conversion; remove it first")
        return
    partial.mkdir(parents=True)
    write_whole(partial / JOB_FILE, json.dumps(job))


def _fingerprint(source: Path, files: list[str]) -> dict[str, Any]:
    stats = {file: (source / file).stat() for file in files}
    return {
        "directory": str(source.resolve()),
        "files": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()},
    }
