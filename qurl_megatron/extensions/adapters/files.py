"""Adapters (LoRA) as peft's directory, and models into which they are merged.

    adapter_config.json         rank, alpha and the layers that have adapters
    adapter_model.safetensors   A [rank, in] and B [out, rank] of each layer, float32
    qurl_base.json              the format that the base was quantized in while they were trained

peft and servers of LoRA read the first two. The base is that of `qurl quantize`: adapters make up
for its errors too, so over the original weights they are not what was trained.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qurl_megatron.config.schema import Config, ConfigError, Rounding, WeightFormat
from qurl_megatron.extensions.adapters.checks import adapted_layers
from qurl_megatron.files import read_json_object, write_whole
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import ADAPTER_CONFIG, Architecture
from qurl_megatron.model.huggingface import Progress, Weights, write_tensors
from qurl_megatron.quantization import offline, quantize
from qurl_megatron.quantization.checksum import checksum, digest
from qurl_megatron.quantization.rounding import write_rounded

CONFIG, TENSORS, BASE = ADAPTER_CONFIG, "adapter_model.safetensors", "qurl_base.json"
_PREFIX = "base_model.model."  # of peft's names
# Fields of peft that are read here, or that say which layers have adapters, or how these were
# trained. Any other that is set, also one of a later peft, may change what an adapter computes.
_HARMLESS = set(
    """task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r
    lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern
    megatron_core qalora_group_size use_rslora rank_pattern alpha_pattern""".split()
)
# Fields that are set for a plain product of A and B too, and the values that they may have.
_PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}


@dataclass(frozen=True)
class AdapterFiles:
    """The adapters of a directory."""

    tensors: Mapping[str, Tensor]  # by peft's names without their prefix
    scaling: Mapping[str, float]  # alpha / rank, or alpha / sqrt(rank) with rsLoRA, by layer
    weight_format: WeightFormat  # of the base
    base: str = ""  # `base_hash` of the base; empty: not known

    def product(self, weight_name: str) -> Tensor | None:
        """Return what is added to a weight, [out, in] float32; None if it has no adapter."""
        layer = weight_name.removesuffix(".weight")
        if layer not in self.scaling:
            return None
        a, b = (self.tensors[f"{layer}.lora_{x}.weight"].float() for x in "AB")
        return self.scaling[layer] * (b @ a)

    def write_into(self, values: Tensor, name: str, scaling: float) -> None:
        """Write the A or B of this name into the first ranks of a larger one.

        Args:
            values: A [rank, in] or B [out, rank], float32, of as many ranks or more.
            scaling: what their product is multiplied by.
        """
        own, layer = self.tensors.get(name), name.partition(".lora_")[0]
        if own is None:
            return
        if name.endswith(".lora_A.weight"):
            values[: len(own)] = own
        else:
            values[:, : own.shape[1]] = own.float() * (self.scaling[layer] / scaling)


def write_adapters(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    alpha: float,
    source: Path,
    weight_format: WeightFormat,
    base: str,
) -> None:
    """Write adapters, given by peft's names without their prefix.

    Args:
        source: the model that they were trained over.
        weight_format: its format in training.
        base: its `base_hash`.
    """
    directory.mkdir(parents=True)
    layers = sorted(name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name)
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": len(tensors[f"{layers[0]}.lora_A.weight"]),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": _modules(layers, Architecture.from_directory(source)),
        "inference_mode": True,
    }
    named = {_PREFIX + name: values.cpu().contiguous() for name, values in tensors.items()}
    write_tensors(named, directory / TENSORS)
    write_whole(directory / BASE, json.dumps({"format": weight_format, "hash": base}) + "\n")
    write_whole(directory / CONFIG, json.dumps(config, indent=2) + "\n")


def _modules(layers: list[str], architecture: Architecture) -> list[str]:
    """Return the last parts of the layers' names if every block has them all, else whole names."""
    kinds = sorted({layer.rpartition(".")[2] for layer in layers})
    return kinds if len(layers) == len(kinds) * architecture.num_layers else layers


def read_adapters(directory: Path) -> AdapterFiles:
    """Read adapters from peft's directory, this project's or another's.

    Without `qurl_base.json` they were trained over the original weights.

    Raises:
        ConfigError: it is not such a directory, its adapters are not plain LoRA of linear layers,
            or its tensors do not fit its configuration.
    """
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / TENSORS)
        base = directory / BASE
        trained = json.loads(base.read_text()) if base.exists() else {"format": "bf16"}
        weight_format, known = trained["format"], str(trained.get("hash", ""))
        names = {name.removeprefix(_PREFIX): values for name, values in tensors.items()}
        ranks = {
            name.removesuffix(".lora_A.weight"): len(values)
            for name, values in names.items()
            if name.endswith(".lora_A.weight")
        }
        said = {layer: int(_of(layer, config, "r", "rank_pattern")) for layer in ranks}
        alphas = {layer: float(_of(layer, config, "lora_alpha", "alpha_pattern")) for layer in said}
        divided_by = math.sqrt if config.get("use_rslora") else float
        scaling = {layer: alphas[layer] / divided_by(rank) for layer, rank in said.items()}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        re.error,
        SafetensorError,
    ) as error:
        raise ConfigError(f"{directory}: no directory of adapters: {error}") from None
    for field, value in config.items():
        if field in _PLAIN and value not in _PLAIN[field]:
            raise ConfigError(
                f"{directory / CONFIG}: {field} is {value!r:.80}, and must be {_PLAIN[field][0]!r}"
            )
        if field not in _PLAIN and field not in _HARMLESS and value:
            raise ConfigError(f"{directory / CONFIG}: {field} is set, and is not supported")
    for layer, factor in scaling.items():
        if not 0 < factor < float("inf"):
            raise ConfigError(
                f"{directory / CONFIG}: lora_alpha={alphas[layer]} over r={said[layer]} is no "
                "factor"
            )
    if weight_format not in get_args(WeightFormat):
        raise ConfigError(f"{directory / BASE}: unknown format {weight_format!r:.80}")
    for layer, rank in ranks.items():
        if rank != said[layer]:
            raise ConfigError(f"{directory}: r is {said[layer]}, and '{layer}' has rank {rank}")
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else [""]:
        if not any(f".{layer}".endswith(f".{target}") or not target for layer in ranks):
            raise ConfigError(f"{directory / TENSORS}: no adapter of {target or 'any layer'}")
    return AdapterFiles(names, scaling, cast(WeightFormat, weight_format), known)


def _of(layer: str, config: Mapping[str, Any], field: str, patterns: str) -> Any:
    """Return a field's value for a layer: of the first pattern that ends its name, as in peft."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return config[field]


def check_start(config: Config, architecture: Architecture) -> None:
    """Check that a run's adapters can begin with those of `adapters.init`.

    Raises:
        ConfigError: they are no adapters of the model, have a higher rank, or are of other layers.
    """
    settings = config.adapters
    named = f"adapters.init={settings.init}"
    found = read_adapters(Path(settings.init))
    try:
        check_adapters(found, architecture)
    except ConfigError as error:
        raise ConfigError(f"{named}: {error}") from None
    layers = adapted_layers(settings.targets, architecture)
    for layer in found.scaling:
        rank = len(found.tensors[f"{layer}.lora_A.weight"])
        if rank > settings.rank:
            raise ConfigError(
                f"{named}: it has rank {rank}; give adapters.rank={rank} or more, and "
                f"adapters.alpha={settings.alpha * rank / settings.rank:g} for the same factor"
            )
        if layer not in layers:
            raise ConfigError(f"{named}: adapters.targets leaves out '{layer}', which it has")


def check_adapters(adapters: AdapterFiles, architecture: Architecture) -> None:
    """Check that each adapter is of a linear layer of the model, of its shape, and finite.

    Raises:
        ConfigError: one is not; the message names it.
    """
    shapes = {
        name: weight_map.full_shape(tensor, architecture)
        for rule in weight_map.rules(architecture)
        if rule.quantized and not rule.of_experts
        for layer in range(architecture.num_layers)
        for tensor, name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True)
    }
    for name, values in adapters.tensors.items():
        layer, _, which = name.partition("lora_")
        shape = shapes.get(f"{layer}weight")
        if shape is None or which not in ("A.weight", "B.weight"):
            raise ConfigError(f"the adapter '{name}' is of no linear layer of the model")
        axis = 1 if which == "A.weight" else 0
        if values.dim() != 2 or values.shape[axis] != shape[axis]:
            raise ConfigError(
                f"the adapter '{name}' has shape {list(values.shape)}, and its layer {list(shape)}"
            )
        if not values.isfinite().all():
            raise ConfigError(f"the adapter '{name}' holds NaN or infinity")
    for layer in {name.partition("lora_")[0] for name in adapters.tensors}:
        a, b = (adapters.tensors.get(f"{layer}lora_{x}.weight") for x in "AB")
        if a is None or b is None or len(a) != b.shape[1]:
            raise ConfigError(f"the adapter of '{layer}weight' lacks A or B, or their ranks differ")


def base_hash(model: Path, weight_format: WeightFormat) -> str:
    """Return what a learner's `base_hash` is over this model in this format; read all of it."""
    architecture = Architecture.from_directory(model)
    weights, sums = Weights(model, architecture), {}
    for name in weight_map.hugging_face_names(architecture):
        weight = weights.read(name, ())
        if weight_map.find_hugging_face(name)[0].quantized:
            with quantize.name_in_errors(name):
                sums[name] = checksum(quantize.quantize(weight, weight_format).codes)
        else:
            sums[name] = checksum(weight.float())
    return digest(sums)


def check_base(config: Config, checkpoint: Path, model: str) -> None:
    """Check that the model is the one, then at `model`, under a checkpoint's adapters.

    Its files are read only if one was written, renamed or linked after the checkpoint. If the
    checkpoint is younger than the change, only the learner finds out, which always compares.

    Raises:
        ConfigError: it is another.
    """
    state, files = checkpoint / "state.json", [f for f in Path(model).glob("*") if f.exists()]
    dates = [each.st_ctime for file in files for each in (file.stat(), file.lstat())]
    if model == config.model and max(dates) <= state.stat().st_ctime:
        return
    base = read_json_object(state).get("base")
    if base and base != base_hash(Path(config.model), config.quantization.weight_format):
        raise ConfigError(
            f"model={config.model}: the adapters of {checkpoint} were trained over another base; "
            "put that model back, or start a new run"
        )


def merge_directory(
    source: Path,
    destination: Path,
    adapters: AdapterFiles,
    weight_format: WeightFormat,
    progress: Progress,
    rounding: Rounding,
) -> None:
    """Write a model with adapters merged into its weights, in the stored dtype.

    Linear layers first take the values that they have in `weight_format`, and those with adapters
    then add the product. `rounding` says how sums become BF16.

    Raises:
        ArchitectureError, ConfigError: the source or the destination cannot be used, or
            `check_adapters` refuses, or the adapters were trained over another base.
    """
    check_adapters(adapters, Architecture.from_directory(source))
    if adapters.base and adapters.base != base_hash(source, adapters.weight_format):
        raise ConfigError(
            f"{source}: the adapters were trained over another base; give that model, unchanged"
        )

    def rewrite(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not weight_map.find_hugging_face(name)[0].quantized:
            return {name: tensor}
        values = tensor.float()
        if weight_format != "bf16":
            values = quantize.dequantize(quantize.quantize(tensor, weight_format))
            if quantize.packing(weight_format) > 1:
                values = values.bfloat16().float()  # as the engine's
        added = adapters.product(name)
        if added is not None:
            values += added
        merged = torch.empty_like(tensor)
        write_rounded(merged, values, name, rounding)
        return {name: merged}

    sums = _sums(adapters)
    job = {"merge": weight_format, "rounding": rounding, "scaling": dict(adapters.scaling)}
    offline.rewrite_directory(source, destination, rewrite, {}, job | {"adapters": sums}, progress)


def _sums(adapters: AdapterFiles) -> dict[str, float]:
    """Return values by which a repeated call recognizes the same adapters."""
    return {name: float(values.double().sum()) for name, values in adapters.tensors.items()}
