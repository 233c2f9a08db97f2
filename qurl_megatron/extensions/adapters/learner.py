"""A learner of adapters over a base that it holds as servers do.

Invariants:

- Codes and scales of the base are the same on any layout, and so are the first values of adapters.
- Servers of the base's format get the base once, and then adapters alone. To servers in BF16 it is
  sent with the adapters merged.
- The reference policy is the base, which needs no copy.
- Checkpoints hold adapters only, and the hash of the base.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.config.schema import (
    LearnerConfig,
    OptimizerConfig,
    QuantizedForward,
    ServerConfig,
    WeightFormat,
)
from qurl_megatron.device import device
from qurl_megatron.extensions.adapters.files import AdapterFiles, read_adapters
from qurl_megatron.extensions.adapters.layers import Adapters, FrozenBase, frozen_layers
from qurl_megatron.extensions.adapters.model import AdaptedModel
from qurl_megatron.learner.learner import Learner, Source
from qurl_megatron.learner.model import tensor_parallel_place
from qurl_megatron.learner.quantized_forward import QuantizedLayer, Served
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import Weights
from qurl_megatron.model.weight_map import HuggingFaceTensor, Rule
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import as_integers, checksum, combine, digest, part_key
from qurl_megatron.quantization.uaq import Transform


class AdaptedLearner(Learner):
    """A learner that trains adapters only; the weights of its model are quantized and frozen."""

    def __init__(
        self,
        model_dir: Path,
        learner: LearnerConfig,
        optimizer: OptimizerConfig,
        *,
        adapters: Adapters,
        **others: Any,
    ) -> None:
        """Build the model, as `Learner` does with these arguments, and load it."""
        self.adapters = adapters
        self._base_sums: dict[str, int] = {}  # checksums of this rank's parts of the base
        self._start: AdapterFiles | None = None  # while the model is loaded
        architecture = Architecture.from_directory(model_dir)
        super().__init__(
            model_dir,
            learner,
            optimizer,
            model=partial(AdaptedModel, adapters),
            architecture=replace(architecture, adapter_rank=adapters.rank),
            **others,
        )

    def keep_reference(self) -> None:
        """Keep nothing: the base is the reference."""

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Score with the base alone within this context."""
        layers = [layer for _, _, layer in self._frozen_layers() if layer.has_adapters]
        for layer in layers:
            layer.is_active = False
        try:
            yield
        finally:
            for layer in layers:
                layer.is_active = True

    def source(self, weight_format: WeightFormat | Literal["masters"]) -> Source:
        """Return what servers of a format hold, or the float32 masters of adapters."""
        if weight_format == "masters":
            return super().source(weight_format)
        if weight_format == "bf16":
            return Source(self.merged, is_lasting=False)
        return Source(self._trained, constants=self._constants)

    def masters(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield the masters of adapters."""
        for rule, layer, parameter in self._held_parameters(of_experts):
            if rule.is_adapter:
                yield rule, layer, self._optimizer_shards.gather_master(parameter)

    def merged(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield this rank's shards of the policy as if it had no adapters, in float32."""
        for rule, layer, shard in self.shards(of_experts=of_experts):
            if not rule.is_adapter:
                yield rule, layer, shard.float()
        for rule, number, module in self._frozen_layers(of_experts):
            yield rule, number, module.merged()

    def base_hash(self) -> str:
        """Return a hash of the base that adapters are trained over, the same on any layout.

        Collective.
        """
        by_rank: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, self._base_sums)
        return digest(combine(by_rank))

    def _trained(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        return (each for each in self.shards(of_experts=of_experts) if each[0].is_adapter)

    def _constants(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor, Tensor | None]]:
        for rule, number, module in self._frozen_layers(of_experts):
            yield rule, number, module.codes, module.scale
        for rule, layer, shard in self.shards(of_experts=of_experts):
            if not rule.is_adapter:
                yield rule, layer, shard, None

    def _frozen_layers(
        self, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int, FrozenBase]]:
        experts = parallel_state.get_expert_model_parallel_group()
        first_expert = experts.rank() * (self.architecture.num_experts // experts.size())
        for chunk in self.chunks:
            for name, module in frozen_layers(chunk.module):
                rule, number = weight_map.find_megatron(f"{name}.weight", first_expert)
                assert number is not None
                if of_experts in (None, rule.of_experts):
                    yield rule, chunk.module.decoder.layers[number].layer_number - 1, module

    @contextmanager
    def _computing_as_served(
        self, served: Served, server: ServerConfig, what: QuantizedForward
    ) -> Iterator[None]:
        layers = [layer for _, _, layer in self._frozen_layers()]
        for rule, _, layer in self._frozen_layers():
            quantized = QuantizedLayer(rule, served.weight_format, server, what)
            layer.round_inputs = quantized.round_inputs
        try:
            with super()._computing_as_served(served, server, what):
                yield
        finally:
            for layer in layers:
                layer.round_inputs = None

    def _untrained(self) -> list[Tensor]:
        layers = [layer for _, _, layer in self._frozen_layers()]
        return super()._untrained() + [each for x in layers for each in (x.codes, x.scale)]

    @torch.no_grad()
    def _load(self, weights: Weights, transform: Transform | None) -> None:
        for rule, layer, module in self._frozen_layers():
            self._load_base(weights, rule, layer, module)
        if self.adapters.init:
            self._start = read_adapters(Path(self.adapters.init))
        super()._load(weights, transform)
        self._start = None

    def _load_base(self, weights: Weights, rule: Rule, layer: int, module: FrozenBase) -> None:
        """Load this rank's part of codes and scales, which are the same on any layout."""
        weight_format = self.adapters.weight_format
        packing, group = quantize.packing(weight_format), quantize.block_shape(weight_format)[1]
        tp_rank, tp_size = tensor_parallel_place(rule)
        codes, scales = [], []
        for part, hf_name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
            # Whole, because a rank's part may hold only some columns of a scale's block.
            whole = tuple(slice(0, n) for n in weight_map.full_shape(part, self.architecture))
            weight = weights.read(hf_name, whole).to(device())
            with quantize.name_in_errors(hf_name):
                quantized = quantize.quantize(weight, weight_format)
            self._base_sums[part_key(hf_name, 0, 0)] = checksum(quantized.codes)
            rows, columns = weight_map.part_index(rule, part, self.architecture, tp_rank, tp_size)
            scale = quantize.engine_scale(quantized)[rows]
            if group:
                scale = scale[:, columns.start // group : columns.stop // group]
            held = slice(columns.start // packing, columns.stop // packing)
            codes.append(as_integers(quantized.codes[rows, held]))  # not every backend joins float8
            scales.append(scale)
        shard = weight_map.merge(rule, codes, self.architecture, tp_size)
        module.codes.copy_(shard.view(module.codes.dtype))
        module.scale.copy_(weight_map.merge(rule, scales, self.architecture, tp_size))

    def _read(
        self, weights: Weights, part: HuggingFaceTensor, name: str, index: tuple[slice, ...]
    ) -> Tensor:
        """Return the first values of an adapter, or the values of a frozen tensor."""
        if name.endswith((".lora_A.weight", ".lora_B.weight")):
            shape = weight_map.full_shape(part, self.architecture)
            is_a = name.endswith(".lora_A.weight")
            whole = initial_a(name, shape, self.adapters.seed) if is_a else torch.zeros(shape)
            if self._start:
                self._start.write_into(whole, name, self.adapters.scaling)
            return whole[index]
        values = super()._read(weights, part, name, index)
        row, column = [*(run.start for run in index), 0][:2]
        total = checksum(values, row_offset=row, column_offset=column)
        self._base_sums[part_key(name, row, column)] = total
        return values


def initial_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial A of a projection, [rank, in] float32, as peft draws it, on any layout."""
    generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
