"""Rewrite a Hugging Face directory: quantize it, scale it by UAQ, or undo the scaling.

UAQ is update-aware quantization (QuRL Eq. 11), see `uaq.py`.

Invariants:
- A directory gets its final name when it is complete. Until then it is `<name>.partial`.
- An interrupted call can be repeated. It keeps the safetensors files that are complete, and
  refuses a `.partial` directory that another job left.
- One piece of the source is in memory at a time: a file, or a part of a file that is larger than
  `MAX_PIECE_BYTES`. Each piece is written as one file.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qurl_megatron.config.keep import kept_layers, layers_of
from qurl_megatron.config.schema import ConfigError, Rounding, UaqConfig, WeightFormat
from qurl_megatron.config.text import from_tree
from qurl_megatron.config.validate import check_scales
from qurl_megatron.files import check_output, partial_of, rename_whole, write_whole
from qurl_megatron.machine.disk import free_bytes
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import (
    Progress,
    Weights,
    check_model,
    copy_beside_weights,
    read_config,
    stored_dtype,
    write_index,
    write_tensors,
)
from qurl_megatron.model.transformers_model import checkpoint_tensors, transformers_model
from qurl_megatron.quantization import quantize, uaq
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.quantization.rounding import write_rounded
from qurl_megatron.quantization.smoothing import Smoothing

JOB_FILE = "job.json"
UAQ_FIELD = "qurl_uaq"  # in config.json: the UaqConfig that a directory was scaled with
PROBE_TOKENS = 64
_PART = re.compile(r":\w+")  # of a name in the weight map
MAX_PIECE_BYTES = 8 * 1024**3  # in float32; published models come in files of 4 to 5 GB of BF16

Rewrite = Callable[[str, Tensor], dict[str, Tensor]]
"""(name of a full tensor, its values as stored) -> the tensors written in its place, by name."""


@dataclass(frozen=True)
class Invariance:
    """Differences between the logits of a scaled and the unscaled model, over random tokens.

    The numbers of tensors tell how much of the original an undo gives back exactly.
    """

    largest_logit: float  # magnitude, of the unscaled model
    float32_difference: float  # largest, with weights scaled in float32
    stored_difference: float  # largest, with the scaled weights rounded to the stored dtype
    exact_tensors: int  # that stay as they are, or are scaled by a power of two
    rounded_tensors: int  # that are scaled by another number, and rounded to the stored dtype


def quantize_directory(
    source: Path,
    destination: Path,
    weight_format: WeightFormat,
    progress: Progress,
    keep: Sequence[str] = (),
    smoothing: Smoothing | None = None,
    rounding: Rounding = "unbiased",
) -> None:
    """Write the tensors that a publish sends, as a directory for SGLang servers to load.

    Linear layers inside blocks become codes and scales, unless `keep` (as in `quantization.keep`)
    names them; everything else becomes BF16, and `rounding` says how float32 values do. The server
    needs this package, except for `fp8-block`, which SGLang's own `fp8` method reads.

    Raises:
        ArchitectureError, ConfigError: the source or the destination cannot be used, or `keep`
            matches no layers, or only a part of layers that a server holds as one.
    """
    architecture = Architecture.from_directory(source)
    architecture.check_blocks(weight_format)
    kept = kept_layers(keep, architecture)

    def rewrite(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if smoothing:  # float16 has too few exponents
            is_half = tensor.dtype == torch.float16
            tensor = smoothing.apply(name, tensor.float() if is_half else tensor)
        is_quantized = weight_map.find_hugging_face(name)[0].quantized
        if weight_format == "bf16" or not is_quantized or name.removesuffix(".weight") in kept:
            sent = torch.empty(tensor.shape, dtype=weight_map.sent_dtype(name))
            write_rounded(sent, tensor, name, rounding)
            return {name: sent}
        quantized = quantize.quantize(tensor, weight_format)
        scale_name = quantize.scale_name(name, weight_format)
        return {name: quantized.codes, scale_name: quantize.engine_scale(quantized)}

    # "torch_dtype" is the older spelling of "dtype".
    changes: dict[str, Any] = {"dtype": "bfloat16", "torch_dtype": None}
    in_bf16 = layers_of(kept)
    if weight_format == "fp8-block":
        # SGLang's own method would quantize these gates.
        names = weight_map.hugging_face_names(architecture)
        gates = [
            name for name in names if name.endswith((".in_proj_a.weight", ".in_proj_b.weight"))
        ]
        in_bf16 += sorted(name.removesuffix(".weight") for name in gates)
        changes["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    elif weight_format != "bf16":
        changes["quantization_config"] = {"quant_method": quantize.ENGINE_METHODS[weight_format]}
    if in_bf16 and weight_format != "bf16":
        changes["quantization_config"]["modules_to_not_convert"] = in_bf16
    job: dict[str, Any] = {"quantize": weight_format, "keep": kept, "rounding": rounding}
    if smoothing:
        job["smoothing"] = [checksum(scales) for scales in smoothing.columns.values()]
    rewrite_directory(source, destination, rewrite, changes, job, progress)


def scale_directory(
    source: Path, destination: Path, config: UaqConfig, progress: Progress
) -> Invariance:
    """Write a copy scaled by UAQ (QuRL Eq. 11), in the stored dtype, and compare logits.

    Raises:
        ArchitectureError, ConfigError: the source or the destination cannot be used, or a scale
            does not fit the model.
    """
    if UAQ_FIELD in read_config(source):
        raise ConfigError(
            f"{source} is scaled already ({UAQ_FIELD} in its config.json); undo that first"
        )
    architecture = Architecture.from_directory(source)
    check_scales(config, architecture)
    changes = {UAQ_FIELD: dataclasses.asdict(config)}
    transform = uaq.transform(config, is_hybrid=architecture.is_hybrid)
    return _scale(source, destination, transform, changes, progress)


def unscale_directory(source: Path, destination: Path, progress: Progress) -> Invariance:
    """Undo `scale_directory`: exact for powers of two, else up to a rounding of the stored dtype.

    Raises:
        ArchitectureError, ConfigError: the source or the destination cannot be used, or
            `UAQ_FIELD` in its config.json is spoilt.
    """
    fields = read_config(source).get(UAQ_FIELD)
    if fields is None:
        raise ConfigError(f"{source} is not scaled: its config.json has no {UAQ_FIELD}")
    config = from_tree(UaqConfig, fields)
    is_hybrid = Architecture.from_directory(source).is_hybrid
    inverse = uaq.inverse(config, is_hybrid=is_hybrid)
    return _scale(source, destination, inverse, {UAQ_FIELD: None}, progress)


def _scale(
    source: Path,
    destination: Path,
    transform: uaq.Transform,
    changes: dict[str, Any],
    progress: Progress,
) -> Invariance:
    """Apply `transform` to every tensor; `changes` are made to config.json."""

    def rewrite(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: transform(name, tensor.float()).to(tensor.dtype)}

    rewrite_directory(source, destination, rewrite, changes, {"uaq": changes[UAQ_FIELD]}, progress)
    return _compare_logits(source, transform)


@torch.no_grad()
def _compare_logits(source: Path, transform: uaq.Transform) -> Invariance:
    """Compare the logits of the model in `source` before and after `transform`."""
    model = transformers_model(source, torch.float32)
    stored = stored_dtype(source)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, PROBE_TOKENS), generator=generator)
    before = model(tokens).logits
    for name, tensor in checkpoint_tensors(model):
        tensor.copy_(transform(name, tensor))
    scaled = model(tokens).logits
    for parameter in model.parameters():
        parameter.copy_(parameter.to(stored))
    rounded = model(tokens).logits
    architecture = Architecture.from_directory(source)
    is_exact: dict[str, bool] = {}  # by the name of a holder tensor, which may hold others
    for name in weight_map.hugging_face_names(architecture):
        zero, one = (float(transform(name, torch.tensor(value))) for value in (0.0, 1.0))
        # A power of two loses no bit. Of a hybrid's norm 1 + w is scaled, and 0 does not stay 0.
        keeps_bits = zero == 0 and math.frexp(one)[0] == 0.5
        holder = weight_map.in_file(name, architecture).name
        is_exact[holder] = keeps_bits and is_exact.get(holder, True)
    exact = sum(is_exact.values())
    return Invariance(
        float(before.abs().max()),
        float((scaled - before).abs().max()),
        float((rounded - before).abs().max()),
        exact_tensors=exact,
        rounded_tensors=len(is_exact) - exact,
    )


def rewrite_directory(
    source: Path,
    destination: Path,
    rewrite: Rewrite,
    changes: dict[str, Any],
    job: dict[str, Any],
    progress: Progress,
) -> None:
    """Rewrite every full tensor, or resume an interrupted call for the same `job`.

    Of a model of text and images, only the text part is written. `changes` are made to config.json;
    None removes a field.
    """
    weights = check_model(source)
    files = weights.files
    if os.path.lexists(destination):  # also a link to nowhere, which a rename would not replace
        raise ConfigError(f"{destination} exists; choose another directory")
    check_output(destination)
    partial = partial_of(destination)
    if partial.is_symlink():
        raise ConfigError(f"{partial} is a link, and may lead elsewhere; remove it first")
    # An upper bound for a quantized copy, less the files of an interrupted call.
    needed = weights.num_bytes * (2 if weights.block else 1)
    needed -= sum(path.stat().st_size for path in partial.glob("*.safetensors"))
    if free_bytes(partial) < needed:
        raise ConfigError(
            f"{destination}: needs up to {gigabytes(needed)} of disk, and has "
            f"{gigabytes(free_bytes(partial))} free"
        )
    _create_or_resume(partial, {"source": _fingerprint(source, files), **job})

    full_tensors = weights.full_tensors()
    pieces = [piece for file in files for piece in _cut(weights, source, file)]
    file_of: dict[str, str] = {}
    done_bytes = 0
    for piece in pieces:
        written = partial / piece.written_file
        if not written.exists():
            try:
                _write_piece(weights, piece, rewrite, full_tensors, written)
            except ArchitectureError:  # a repeated call would fail as well
                shutil.rmtree(partial)
                raise
        with safe_open(written, "pt") as opened:
            file_of |= dict.fromkeys(opened.keys(), piece.written_file)
        done_bytes += piece.num_bytes
        progress(done_bytes, sum(piece.num_bytes for piece in pieces))

    copy_beside_weights(source, partial)
    if len(pieces) > 1:
        write_index(partial, file_of)
    removed = {name for name, value in changes.items() if value is None}
    config = {**read_config(source), **changes}
    config = {name: value for name, value in config.items() if name not in removed}
    write_whole(partial / "config.json", json.dumps(config, indent=2) + "\n")
    (partial / JOB_FILE).unlink()
    rename_whole(partial, destination)


@dataclass
class _Piece:
    """Tensors of one source file that are in memory together, and are written to one file."""

    source_file: str
    written_file: str
    names: list[str] = dataclasses.field(default_factory=list)
    num_bytes: int = 0  # in float32, as they are rewritten


def _cut(weights: Weights, source: Path, file: str) -> list[_Piece]:
    """Cut a source file into pieces of at most MAX_PIECE_BYTES, or of one larger tensor."""
    pieces = [_Piece(file, written_file=file)]
    with safe_open(source / file, "pt") as opened:
        for name in weights.names(file):
            num_bytes = 4 * math.prod(opened.get_slice(name).get_shape())
            if pieces[-1].names and pieces[-1].num_bytes + num_bytes > MAX_PIECE_BYTES:
                pieces.append(_Piece(file, written_file=file))
            pieces[-1].names.append(name)
            pieces[-1].num_bytes += num_bytes
    if len(pieces) > 1:
        for number, piece in enumerate(pieces, start=1):
            piece.written_file = f"{file.removesuffix('.safetensors')}-{number:05}.safetensors"
    return pieces


def _write_piece(
    weights: Weights,
    piece: _Piece,
    rewrite: Rewrite,
    full_tensors: Mapping[str, Mapping[str, weight_map.Place]],
    path: Path,
) -> None:
    """Write the tensors of a piece; a tensor that holds no full tensor is copied unchanged."""
    written: dict[str, list[Tensor]] = {}
    for stored in piece.names:
        tensor = weights.whole(stored)
        if stored not in full_tensors:
            written[stored] = [tensor]
        for name, place in full_tensors.get(stored, {}).items():
            for new_name, values in rewrite(name, tensor[place.where]).items():
                # Parts of one tensor of the source, and their scales, are joined again.
                written.setdefault(_PART.sub("", new_name), []).append(values)
    tensors = {
        name: torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        for name, parts in written.items()
    }
    for name in tensors:
        if name.endswith(".conv1d.weight"):  # the shape of torch's Conv1d
            tensors[name] = tensors[name].unsqueeze(1)
    write_tensors(tensors, path)


def _create_or_resume(partial: Path, job: dict[str, Any]) -> None:
    """Create the unfinished directory, or accept one that a call for the same job left."""
    job = json.loads(json.dumps(job))  # as it is read back: a tuple becomes a list
    if partial.exists():
        job_file = partial / JOB_FILE
        if not job_file.exists() or json.loads(job_file.read_text()) != job:
            raise ConfigError(f"{partial} was left by another conversion; remove it first")
        return
    partial.mkdir(parents=True)
    write_whole(partial / JOB_FILE, json.dumps(job))


def _fingerprint(source: Path, files: list[str]) -> dict[str, Any]:
    """Return values that identify the source directory and the content of its files."""
    stats = {file: (source / file).stat() for file in files}
    return {
        "directory": str(source.resolve()),
        "files": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()},
    }
