"""Adapters in plain torch, in float64, and adapters with the same values in a learner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner_reference import OPTIMIZER
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.extensions.adapters.learner import initial_a
from qurl_megatron.model import weight_map
from qurl_megatron.quantization import quantize

RANK, ALPHA = 4, 8.0
PLAIN = replace(OPTIMIZER, clip_grad=0.0, warmup_steps=0, weight_decay=0.0)
# INT4's groups of 32 must be whole on each rank.
WHOLE_GROUPS = {"hidden_size": 96, "intermediate_size": 256, "head_dim": 32}


def random_b(name: str, shape: tuple[int, ...]) -> Tensor:
    return 0.3 * initial_a(name, shape, 5) * shape[1] ** 0.5


def write_b(learner: Any) -> None:
    """Give the B of every projection with an adapter the same values on any layout."""
    from qurl_megatron.extensions.adapters.checks import adapted_layers
    from qurl_megatron.learner.model import tensor_parallel_place

    targets = adapted_layers(learner.adapters.targets, learner.architecture)
    for _, rule, layer, parameter in learner._parameters():
        if not rule.megatron_names[0].endswith("lora_b"):
            continue
        place = tensor_parallel_place(rule)
        parts = []
        for part, name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
            index = weight_map.part_index(rule, part, learner.architecture, *place)
            whole = random_b(name, weight_map.full_shape(part, learner.architecture))
            is_target = name.removesuffix(".lora_B.weight") in targets
            parts.append(whole[index] * is_target)
        shard = weight_map.merge(rule, parts, learner.architecture, place[1])
        learner._optimizer_shards.write(parameter, shard)


class Adapted(torch.nn.Module):
    """A linear layer and its adapter, written down as the paper on LoRA has it."""

    def __init__(self, base: torch.nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = (torch.nn.Parameter(each.double()) for each in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.nn.functional.linear(x, self.a)
        update = torch.nn.functional.linear(low, self.b)
        return self.base(x) + ALPHA / RANK * update


def base_of(directory: Path, weight_format: WeightFormat) -> Any:
    """Return the model whose linear layers have the values of a server's codes, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    tensors = dict(model.named_parameters())
    for name in list(tensors):
        if ".experts." in name:  # stacked by transformers: gate and up, and down, of all experts
            for expert in tensors[name].data:
                for half in expert.chunk(2) if "gate_up" in name else [expert]:
                    half.copy_(rounded(half.clone(), weight_format))
        elif weight_map.find_hugging_face(name)[0].quantized:
            tensors[name].data = rounded(tensors[name].data, weight_format)
    return model.double().requires_grad_(False)


def rounded(weight: Tensor, weight_format: WeightFormat) -> Tensor:
    if weight_format == "bf16":  # as it is stored
        return weight
    values = quantize.dequantize(quantize.quantize(weight, weight_format))
    return values.bfloat16().float() if weight_format.startswith("int4") else values


def adapt(model: Any, adapters: dict[str, Tensor]) -> dict[str, torch.nn.Parameter]:
    """Put adapters into a model; return them by name."""
    held: dict[str, torch.nn.Parameter] = {}
    for name, a in adapters.items():
        path, is_a, _ = name.partition(".lora_A.weight")
        if is_a:
            parent, _, last = path.rpartition(".")
            place = model.get_submodule(parent)
            layer = Adapted(getattr(place, last), a, adapters[f"{path}.lora_B.weight"])
            setattr(place, last, layer)
            held |= {name: layer.a, f"{path}.lora_B.weight": layer.b}
    return held
