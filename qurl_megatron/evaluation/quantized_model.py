"""A Hugging Face model whose linear layers compute what an SGLang server's layers compute.

Each layer can be switched between codes and BF16. The arithmetic is that of the plugin on a CPU
(`qurl_megatron/sglang_plugin/linear.py` and `moe.py`), so codes of weights and activations are the
server's, bit for bit. The rest is that of transformers in BF16, and logits are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.keep import fused_layers
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.device import device
from qurl_megatron.evaluation.attribution import ActivationMeter, module_of
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization import quantize
from qurl_megatron.sglang_plugin import formats, linear, moe

Sampled = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response to it."""

_CONFIGS: dict[str, type[formats.QurlConfig]] = {
    config.get_name(): config
    for config in (formats.Int8Config, formats.Fp8Config, formats.Fp8BlockConfig)
}


class SwitchedLinear(torch.nn.Module):
    """A linear layer that multiplies by codes if `is_quantized`, else by its BF16 weight."""

    def __init__(self, exact: torch.nn.Linear, weight_format: WeightFormat) -> None:
        super().__init__()
        config = _CONFIGS[quantize.ENGINE_METHODS[weight_format]]()
        self.method = config.linear_method(config)
        quantized = quantize.quantize(exact.weight.detach(), weight_format)
        self.weight, self.bias = exact.weight, exact.bias
        self.codes, self.scale = quantized.codes, quantize.engine_scale(quantized)
        self.is_quantized = True
        self.meter: ActivationMeter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., in] bfloat16 to [..., out] bfloat16."""
        rows = x.flatten(0, -2)
        if self.meter is not None:
            self.meter.add(rows)
        if not self.is_quantized:
            return linear.multiply_unquantized(x, self.weight, self.bias)
        out = self.method.multiply_cpu(rows, self.codes, self.scale, self.bias)
        return out.view(*x.shape[:-1], -1)


class Experts(torch.nn.ModuleList):
    """The experts of a block, each with the linear layers that a checkpoint names."""

    def __init__(self, fused: Any) -> None:
        """Take the weights of transformers' module, which holds those of all experts as one."""
        super().__init__()
        for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
            expert = torch.nn.Module()
            gate, up = gate_up.chunk(2)
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                rows, columns = weight.shape
                layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
                layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
                expert.register_module(name, layer)
            self.append(expert)
        self.meter: ActivationMeter | None = None

    def forward(self, x: Tensor, chosen: Tensor, routing_weights: Tensor) -> Tensor:
        """Sum the experts `chosen` [tokens, experts] of `x` [tokens, hidden] as a server does."""
        if self.meter is not None:
            self.meter.add(x)

        def multiply(rows: Tensor, prefix: str, expert: int) -> Tensor:
            layers: Any = self[expert]
            if prefix == "w2":
                return layers.down_proj(rows)
            return torch.cat([layers.gate_proj(rows), layers.up_proj(rows)], -1)

        dispatched: Any = SimpleNamespace(
            hidden_states=x, topk_output=(routing_weights, chosen, None)
        )
        return moe.sum_over_experts(dispatched, multiply).hidden_states


class Float32Head(torch.nn.Module):
    """The output layer, with float32 logits."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., hidden] bfloat16 to logits [..., vocabulary] float32."""
        return torch.nn.functional.linear(x.float(), self.weight.float())


class QuantizedModel:
    """A causal language model with one switch for each layer that a server holds as one."""

    def __init__(self, directory: Path, weight_format: WeightFormat) -> None:
        """Load and quantize the model in a Hugging Face directory that `check_model` accepts."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        architecture = Architecture.from_directory(directory)
        # transformers' types do not fit each other.
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        self._model = model.to(device()).eval()
        self._model.generation_config = GenerationConfig(
            do_sample=True,
            top_k=0,
            eos_token_id=list(architecture.eos_token_ids),
            pad_token_id=0,
        )
        self.groups = fused_layers(architecture)
        if architecture.num_experts:
            for layer in range(architecture.num_layers):
                block = self._model.get_submodule(f"model.layers.{layer}.mlp")
                block.experts = Experts(block.experts)
        self._layers: dict[str, SwitchedLinear] = {}
        for name in (name for group in self.groups for name in group):
            parent, _, last = name.rpartition(".")
            switched = SwitchedLinear(self._model.get_submodule(name), weight_format)
            setattr(self._model.get_submodule(parent), last, switched)
            self._layers[name] = switched
        self._model.lm_head = Float32Head(self._model.lm_head.weight.detach())

    def added_bytes(self, group: Sequence[str]) -> int:
        """Return by how much a server's weights grow if these layers stay in BF16."""
        layers = [self._layers[name] for name in group]
        return sum(x.weight.nbytes - x.codes.nbytes - x.scale.nbytes for x in layers)

    @contextmanager
    def keeping(self, kept: Sequence[str]) -> Iterator[None]:
        """Compute the layers of these names in BF16 within this context."""
        for name in kept:
            self._layers[name].is_quantized = False
        try:
            yield
        finally:
            for name in kept:
                self._layers[name].is_quantized = True

    def meters(self) -> list[ActivationMeter]:
        """Return a new meter for the input of each of `groups`."""
        dtype = self._layers[self.groups[0][0]].method.code_dtype
        return [ActivationMeter(lambda x: linear.quantize_tokens(x, dtype)) for _ in self.groups]

    @contextmanager
    def measuring(self, meters: Sequence[ActivationMeter]) -> Iterator[None]:
        """Have these meters measure within this context."""
        first_layers: list[Any] = [
            self._model.get_submodule(module_of(group[0])) for group in self.groups
        ]
        for layer, meter in zip(first_layers, meters, strict=True):
            layer.meter = meter
        try:
            yield
        finally:
            for layer in first_layers:
                layer.meter = None

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Prompt], length: int, seed: int) -> list[Sampled]:
        """Sample one response to each prompt, of at most `length` tokens, at temperature 1."""
        torch.manual_seed(seed)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        rows = [[0] * (longest - len(prompt.token_ids)) + prompt.token_ids for prompt in prompts]
        widths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device())
        mask = torch.arange(longest, device=device()) >= longest - widths[:, None]
        sampled = self._model.generate(
            torch.tensor(rows, device=device()), attention_mask=mask.long(), max_new_tokens=length
        )
        ends = set(self._model.generation_config.eos_token_id)
        sequences = []
        for prompt, row in zip(prompts, sampled[:, longest:].tolist(), strict=True):
            end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
            sequences.append((prompt.token_ids, row[: end + 1]))
        return sequences

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sampled]) -> Tensor:
        """Return the logits of the responses' tokens: [sequences, response, vocabulary] float32.

        All prompts have one length, and so have all responses.
        """
        tokens = torch.tensor([prompt + response for prompt, response in sequences])
        kept = len(sequences[0][1]) + 1
        out = self._model(tokens.to(device()), logits_to_keep=kept, use_cache=False)
        return out.logits[:, :-1].float()
