"""The Megatron model of a policy whose linear layers have a frozen base and adapters."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from qurl_megatron.extensions.adapters.checks import adapted_layers
from qurl_megatron.extensions.adapters.layers import Adapters, freeze, frozen_layers
from qurl_megatron.learner.layers import block_spec
from qurl_megatron.learner.model import PolicyModel, tensor_parallel_place
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture


class AdaptedModel(PolicyModel):
    """A policy of which only adapters are trained; experts have none."""

    def __init__(
        self,
        adapters: Adapters,
        config: TransformerConfig,
        architecture: Architecture,
        virtual_stage: int | None,
    ) -> None:
        config.adapters = adapters  # type: ignore[attr-defined]  # the layers read it
        layers = block_spec(config, virtual_stage)
        for layer in layers.layer_specs or []:
            freeze(layer, layers.layer_norm)
        super().__init__(config, architecture, virtual_stage, layers)
        self.requires_grad_(False)
        self._add_adapters(adapters)
        if self.pre_process:
            # A frozen embedding's output has no gradient, and then the adapters of recomputed
            # layers would get none either.
            self.embedding.register_forward_hook(_ask_for_gradient)

    def is_saved(self, name: str) -> bool:
        """Return whether checkpoints hold a tensor: only adapters; the base has its directory."""
        return ".lora_" in name

    def _add_adapters(self, adapters: Adapters) -> None:
        architecture = self._architecture
        targets = adapted_layers(adapters.targets, architecture)
        for name, module in frozen_layers(self):
            rule, number = weight_map.find_megatron(f"{name}.weight")
            if rule.of_experts:
                continue
            assert number is not None
            names = rule.hugging_face_names(self.decoder.layers[number].layer_number - 1)
            rank, size = tensor_parallel_place(rule)
            places = torch.eye(len(names), dtype=torch.bool)
            rows = [
                places[[each] * (part.stop - part.start)]
                & (names[each].removesuffix(".weight") in targets)
                for each, tensor in enumerate(rule.tensors)
                for part in weight_map.part_index(rule, tensor, architecture, rank, size)[:1]
            ]
            is_row_parallel = rule.tensors[0].partition_dim == 1
            module.add_adapters(
                weight_map.merge(rule, rows, architecture, size),
                replicated="lora_b" if is_row_parallel else "lora_a",
            )


def _ask_for_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
