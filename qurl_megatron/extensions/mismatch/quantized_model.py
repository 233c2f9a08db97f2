"""A Hugging Face model whose linear layers compute what an SGLang server's layers compute.

Each layer can be switched between codes and BF16. The arithmetic is that of the plugin on a CPU
(`qurl_megatron/sglang_plugin/linear.py` and `formats.py`), so codes of weights and activations are
the server's, bit for bit. The rest is that of transformers in BF16, and logits are float32.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.keep import fused_layers, kept_layers, module_of
from qurl_megatron.config.schema import UaqConfig, WeightFormat
from qurl_megatron.device import device
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.transformers_model import checkpoint_tensors, transformers_model
from qurl_megatron.quantization import quantize, uaq
from qurl_megatron.quantization.activations import BLOCK, in_groups, quantize_tokens
from qurl_megatron.quantization.products import kept
from qurl_megatron.quantization.smoothing import Maxima, Smoothing
from qurl_megatron.sglang_plugin import formats, linear

Sampled = tuple[list[int], list[int]]
"""Token ids of a prompt and of a completion to it."""


class SwitchedLinear(torch.nn.Module):
    """A linear layer that multiplies by codes if `is_quantized`, else by its BF16 weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> None:
        super().__init__()
        config = formats.CONFIGS[quantize.ENGINE_METHODS[weight_format]]()
        self.method = config.linear_method(config)
        self.weight, self.bias = weight, bias
        self._weight_format = weight_format
        self.quantize()
        self.is_quantized = True

    def quantize(self) -> None:
        """Make codes and scales of the weight."""
        quantized = quantize.quantize(self.weight.detach(), self._weight_format)
        self.codes, self.scale = quantized.codes, quantize.engine_scale(quantized)

    @torch.inference_mode()
    def error(self, x: Tensor, scales: Tensor | None = None) -> tuple[float, float]:
        """Return the squares of the result for `x` [tokens, in], and of what codes change in it.

        With `scales` [in] the layer computes without smoothing: of x * scales.
        """
        weight, codes, scale = self.weight, self.codes, self.scale
        if scales is not None:
            x, weight = x * scales.to(x), weight / scales.to(weight)
            quantized = quantize.quantize(weight, self._weight_format)
            codes, scale = quantized.codes, quantize.engine_scale(quantized)
        exact = linear.multiply_unquantized(x, weight, None).double()
        out = self.method.multiply_cpu(x, codes, scale, None)
        return float(exact.square().sum()), float((out - exact).square().sum())

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., in] bfloat16 to [..., out] bfloat16."""
        if not self.is_quantized:
            return linear.multiply_unquantized(x, self.weight, self.bias)
        out = self.method.multiply_cpu(x.flatten(0, -2), self.codes, self.scale, self.bias)
        return out.view(*x.shape[:-1], -1)


class ActivationMeter:
    """Measures the inputs of one layer over any number of calls."""

    def __init__(self, code_dtype: torch.dtype | None) -> None:
        """Start with no input; `code_dtype` is that of the inputs' codes, None without codes."""
        self._code_dtype = code_dtype
        self._largest = torch.zeros(())
        self._sums = torch.zeros(3, dtype=torch.float64)  # of squares: values, two errors
        # Of squares: results and their errors, as the layer is and without smoothing.
        self._results = torch.zeros(2, 2, dtype=torch.float64)

    def add(
        self, x: Tensor, layer: SwitchedLinear | None = None, scales: Tensor | None = None
    ) -> None:
        """Measure `x` [tokens, channels], and what `layer` makes of it if there is one.

        `scales` [channels] are those of smoothing.
        """
        if layer and len(x):
            own = layer.error(x)
            unsmoothed = own if scales is None else layer.error(x, scales)
            self._results += torch.tensor([own, unsmoothed], dtype=torch.float64)
        x = x.float()
        self._largest = torch.maximum(x.abs().amax(0).cpu(), self._largest)
        errors = (self._error(x), self._error(in_groups(x, BLOCK)))
        self._sums += torch.tensor([float(x.double().square().sum()), *errors]).double()

    def _error(self, rows: Tensor) -> float:
        if self._code_dtype is None:
            return 0.0
        codes, scale = quantize_tokens(rows, self._code_dtype)
        return float((codes * scale - rows).double().square().sum())

    def measured(self) -> dict[str, Any]:
        """Return the row of the inputs' table.

        The outlier is the channel with the largest activation. Its ratio is this activation over
        the median of the channels' largest ones. An error is the norm of the rounding errors over
        the norm of the values; it is also given of the layer's result.
        """
        channel = int(self._largest.argmax())
        of_inputs = [_relative(self._sums[[0, error]]) for error in (1, 2)]
        return {
            "outlier_channel": channel,
            "outlier_ratio": float(
                self._largest[channel] / self._largest.median().clamp(min=1e-30)
            ),
            "error_per_token": of_inputs[0],
            "error_per_128_channels": of_inputs[1],
            "result_error": _relative(self._results[0]),
            "result_error_unsmoothed": _relative(self._results[1]),
        }


def _relative(squares: Tensor) -> float:
    of_values, of_errors = squares.tolist()
    return math.sqrt(of_errors / of_values) if of_values else 0.0


class Parts(torch.nn.ModuleDict):
    """A linear layer with the rows of several full tensors, each quantized by itself."""

    def __init__(
        self, weight: Tensor, sizes: Mapping[str, int], weight_format: WeightFormat
    ) -> None:
        """Cut `weight` [rows, in] into parts of `sizes` rows."""
        rows = weight.split([*sizes.values()])
        parts = zip(sizes, rows, strict=True)
        super().__init__({name: SwitchedLinear(x, None, weight_format) for name, x in parts})

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., in] bfloat16 to [..., rows] bfloat16."""
        return torch.cat([part(x) for part in self.values()], -1)


class Experts(torch.nn.ModuleList):
    """The experts of a block, each with the linear layers that a checkpoint names."""

    def __init__(self, fused: Any, weight_format: WeightFormat) -> None:
        """Take the weights of transformers' module, which fuses those of all experts."""
        super().__init__()
        for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            weights = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            self.append(
                torch.nn.ModuleDict(
                    {name: SwitchedLinear(x, None, weight_format) for name, x in weights.items()}
                )
            )

    def forward(self, x: Tensor, chosen: Tensor, routing_weights: Tensor) -> Tensor:
        """Sum the experts `chosen` [tokens, experts] of `x` [tokens, hidden] as a server does."""

        def multiply(rows: Tensor, prefix: str, expert: int) -> Tensor:
            layers: Any = self[expert]
            if prefix == "w2":  # SGLang's name for down_proj; w13 is gate_proj and up_proj
                return layers["down_proj"](rows)
            return torch.cat([layers["gate_proj"](rows), layers["up_proj"](rows)], -1)

        dispatched: Any = SimpleNamespace(
            hidden_states=x, topk_output=(routing_weights, chosen, None)
        )
        return formats.sum_over_experts(dispatched, multiply).hidden_states


class Float32Head(torch.nn.Module):
    """The output layer, with float32 logits over a temperature."""

    def __init__(self, weight: Tensor, temperature: float) -> None:
        super().__init__()
        self.weight, self.temperature = weight, temperature

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., hidden] bfloat16 to logits [..., vocabulary] float32."""
        weight = kept(self.weight, Tensor.float)
        return torch.nn.functional.linear(x.float(), weight) / self.temperature


class QuantizedModel:
    """A causal language model with a switch for each linear layer.

    `layers` has the linear layers by name, and `groups` the names of the layers that a server holds
    as one, without those to `keep` in BF16. All logits are over the temperature, as those of a run
    are, so samples are drawn at it too.
    """

    def __init__(
        self,
        directory: Path,
        weight_format: WeightFormat,
        stop_token_ids: list[int],
        temperature: float = 1.0,
        scaling: UaqConfig | None = None,
        keep: Sequence[str] = (),
    ) -> None:
        """Load and quantize the model in a Hugging Face directory that `check_model` accepts.

        Args:
            scaling: UAQ of the run; None: none.
            keep: `quantization.keep` of the run.
        """
        from transformers import GenerationConfig

        architecture = Architecture.from_directory(directory)
        self.model = transformers_model(directory, torch.bfloat16).to(device()).eval()
        self.model.generation_config = GenerationConfig(
            do_sample=True,
            top_k=0,
            eos_token_id=stop_token_ids,
            pad_token_id=0,
        )
        if scaling:
            scale = uaq.transform(scaling, is_hybrid=architecture.is_hybrid)
            for name, weight in checkpoint_tensors(self.model):
                weight.data.copy_(scale(name, weight.data.float()))
        self._architecture = architecture
        self.smoothing: Smoothing | None = None
        groups = fused_layers(architecture)
        self.kept = kept_layers(keep, architecture)
        self.groups = [group for group in groups if group[0] not in self.kept]
        self.names = [name for group in groups for name in group]
        if architecture.num_experts:
            for number in range(architecture.num_layers):
                block = self.model.get_submodule(f"model.layers.{number}.mlp")
                block.experts = Experts(block.experts, weight_format)
        if hybrid := architecture.delta_net:
            sizes = {"query": hybrid.keys, "key": hybrid.keys, "value": hybrid.values}
            for block in self.model.model.layers:
                if (mixer := getattr(block, "linear_attn", None)) is not None:
                    mixer.in_proj_qkv = Parts(mixer.in_proj_qkv.weight, sizes, weight_format)
        self.layers: dict[str, SwitchedLinear] = {}
        for name in self.names:
            layer = self.model.get_submodule(name.replace(":", "."))
            if not isinstance(layer, SwitchedLinear):
                parent, _, last = name.rpartition(".")
                layer = SwitchedLinear(layer.weight, layer.bias, weight_format)
                setattr(self.model.get_submodule(parent), last, layer)
            self.layers[name] = layer
        method = self.layers[self.names[0]].method
        code_dtype = method.code_dtype if method.quantizes_activations else None
        self.meters = [ActivationMeter(code_dtype) for _ in self.groups]
        for group, meter in zip(self.groups, self.meters, strict=True):
            first_layer = self.model.get_submodule(module_of(group[0]))
            measure = functools.partial(self._measure, meter, group[0])
            first_layer.register_forward_pre_hook(measure)
        self.model.lm_head = Float32Head(self.model.lm_head.weight.detach(), temperature)

    @torch.inference_mode()
    def smooth(self, prompts: Sequence[Prompt], exponent: float) -> None:
        """Smooth weights and inputs as a run does, by the largest inputs over `prompts`."""
        maxima = Maxima(self._architecture, device())
        hooks = []
        for name, layer in self.layers.items():
            maxima.add_weight(f"{name}.weight", layer.weight)
            see = functools.partial(maxima.add_input, f"{name}.weight")
            hooks.append(
                layer.register_forward_pre_hook(lambda _, x, see=see: see(x[0].flatten(0, -2)))
            )
        self._switch(self.names, measures=False)
        for prompt in prompts:
            self.model(torch.tensor([prompt.token_ids], device=device()), logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        self.smoothing = smoothing = maxima.smoothing(exponent)
        for name in {*smoothing.columns, *smoothing.rows}:
            module, _, kind = name.rpartition(".")
            holder = self.layers.get(module) or self.model.get_submodule(module)
            values = smoothing.apply(name, getattr(holder, kind).detach())
            setattr(holder, kind, torch.nn.Parameter(values, requires_grad=False))
        for layer in self.layers.values():
            layer.quantize()

    def added_bytes(self, group: Sequence[str]) -> int:
        """Return by how much a server's weights grow if these layers stay in BF16."""
        layers = [self.layers[name] for name in group]
        return sum(x.weight.nbytes - x.codes.nbytes - x.scale.nbytes for x in layers)

    def _switch(self, kept: Sequence[str], measures: bool) -> None:
        """Choose the layers that are computed in BF16, and whether inputs are measured."""
        exact = {*kept, *self.kept}
        for name, layer in self.layers.items():
            layer.is_quantized = name not in exact
        self._measures = measures

    def _measure(
        self, meter: ActivationMeter, name: str, _: torch.nn.Module, inputs: tuple[Any, ...]
    ) -> None:
        if self._measures:
            columns = self.smoothing.columns if self.smoothing else {}
            scales = columns.get(f"{name}.weight")
            meter.add(inputs[0].flatten(0, -2), self.layers[name], scales)

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Prompt], length: int, seed: int, kept: Sequence[str] = ()
    ) -> list[Sampled]:
        """Sample one completion to each prompt, of at most `length` tokens.

        The layers of the names `kept` are computed in BF16.
        """
        self._switch(kept, measures=False)
        torch.manual_seed(seed)
        # Padding goes on the left, so that all completions begin at the same position.
        longest = max(len(prompt.token_ids) for prompt in prompts)
        rows = [[0] * (longest - len(prompt.token_ids)) + prompt.token_ids for prompt in prompts]
        widths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device())
        mask = torch.arange(longest, device=device()) >= longest - widths[:, None]
        sampled = self.model.generate(
            torch.tensor(rows, device=device()), attention_mask=mask.long(), max_new_tokens=length
        )
        ends = set(self.model.generation_config.eos_token_id)
        sequences = []
        for prompt, row in zip(prompts, sampled[:, longest:].tolist(), strict=True):
            end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
            sequences.append((prompt.token_ids, row[: end + 1]))
        return sequences

    @torch.inference_mode()
    def logits(
        self, sequences: Sequence[Sampled], kept: Sequence[str] = (), *, measures: bool = False
    ) -> Tensor:
        """Return the logits of completions' tokens: [sequences, completion, vocabulary] float32.

        All prompts have one length, and so have all completions. The layers of the names `kept` are
        computed in BF16. If it `measures`, each of `meters` measures the input of its group.
        """
        self._switch(kept, measures)
        tokens = torch.tensor([prompt + completion for prompt, completion in sequences])
        positions = len(sequences[0][1]) + 1
        out = self.model(tokens.to(device()), logits_to_keep=positions, use_cache=False)
        return out.logits[:, :-1].float()
