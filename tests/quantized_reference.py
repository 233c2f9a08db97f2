"""Models of transformers whose linear layers multiply what servers' layers multiply."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from learner_reference import logprobs_and_entropy_of, make_rows, policy_gradient
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.model.transformers_model import checkpoint_tensors
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.activations import activation_dtype, in_groups, quantize_tokens
from qurl_megatron.quantization.rounding import write_rounded

# Groups of 32 channels fit every layer; those of o_proj lie on both of two ranks.
GROUPS: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}


class _With(torch.autograd.Function):
    """Other values in place of a tensor's, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def scores_and_gradient(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs and the gradient of a transformers model, named as in a checkpoint."""
    rows = make_rows()
    logprobs, entropy = logprobs_and_entropy_of(model, rows.tokens, 1.0)
    weights = rows.loss_mask / rows.loss_mask.sum()
    model.zero_grad()
    policy_gradient(logprobs, entropy, rows, weights)[0].backward()
    of = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    names: Any = SimpleNamespace(named_parameters=of.items, config=model.config)
    return logprobs.detach(), dict(checkpoint_tensors(names))


def with_quantized_layers(model: Any, weight_format: WeightFormat, ranks_of_server: int) -> Any:
    """Quantize the weights of a transformers model, and what its linear layers multiply."""
    code_dtype = activation_dtype(weight_format)

    def quantized(weight: Tensor) -> Tensor:
        values = quantize.dequantize(quantize.quantize(weight, weight_format))
        return values.bfloat16().float() if weight_format.startswith("int4") else values

    def round_input(columns: int, _: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0].detach()
        assert code_dtype
        codes, scale = quantize_tokens(in_groups(x.flatten(0, -2), columns), code_dtype)
        values = (codes * scale).view(x.shape[0] * x.shape[1], -1)[:, : x.shape[-1]].view_as(x)
        return (_With.apply(inputs[0], values.to(x.dtype)),)

    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, Tensor):
                for experts in (module.gate_up_proj, module.down_proj):
                    experts.copy_(quantized(experts.flatten(0, 1)).view_as(experts))
            if not isinstance(module, torch.nn.Linear) or name.endswith(
                ("lm_head", "in_proj_a", "in_proj_b")
            ):
                continue
            module.weight.copy_(quantized(module.weight))
            is_divided = name.endswith(("o_proj", "down_proj", "out_proj"))
            columns = module.in_features // (ranks_of_server if is_divided else 1)
            if weight_format == "fp8-block":
                columns = 128
            if code_dtype:
                module.register_forward_pre_hook(
                    lambda *args, columns=columns: round_input(columns, *args)
                )
    return model


def as_sent(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return unquantized weights as servers get them, in BF16."""
    sent = {name: weight.bfloat16() for name, weight in weights.items()}
    for name, weight in weights.items():
        write_rounded(sent[name], weight, name, "unbiased")
    return {name: weight.float() for name, weight in sent.items()}
