"""Gated DeltaNet of packed sequences, behind Megatron's interface of attention."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import _split_tensor_factory
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from qurl_megatron.model.delta_rule import causal_conv, chunk_plan, gated_delta_rule


class GatedDeltaNet(MegatronModule):
    """Megatron's layer of this name, for packed sequences and without flash-linear-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        ranks = self.tp_group.size()
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.key_heads = config.linear_num_key_heads // ranks
        self.value_heads = config.linear_num_value_heads // ranks
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = [2 * keys + values, values]
        self.qkv_widths = [keys, keys, values]
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.widths) * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.gates = build_module(
            submodules.in_proj,
            config.hidden_size,
            2 * self.value_heads * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        kwargs = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        width = config.linear_conv_kernel_dim
        self.conv1d = torch.nn.Module()
        self.conv1d.weight = torch.nn.Parameter(torch.empty(self.widths[0], width, **kwargs))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.value_heads, **kwargs))
        self.A_log = torch.nn.Parameter(torch.empty(self.value_heads, **kwargs))
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=self.value_dim,
            eps=config.layernorm_epsilon,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            values * ranks,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Mix [tokens / ranks, 1, hidden] within packed sequences."""
        assert packed_seq_params is not None
        bounds = tuple(packed_seq_params.cu_seqlens_q_padded.tolist())  # on the host
        plan = chunk_plan(bounds, hidden_states.device)
        mixed, _ = self.in_proj(hidden_states)
        qkv, gate = mixed.squeeze(1).split(self.widths, -1)
        beta, decay = self.gates(hidden_states)[0].squeeze(1).chunk(2, -1)
        qkv = torch.nn.functional.silu(causal_conv(qkv, self.conv1d.weight, plan.since))
        query, key, value = qkv.split(self.qkv_widths, -1)
        decay = torch.nn.functional.softplus(decay.float() + self.dt_bias.float())
        out, _ = gated_delta_rule(
            query.unflatten(-1, (-1, self.key_dim)),
            key.unflatten(-1, (-1, self.key_dim)),
            value.unflatten(-1, (-1, self.value_dim)),
            -self.A_log.float().exp() * decay,
            beta.sigmoid(),
            plan,
        )
        out = out.to(mixed.dtype)
        gate = gate.unflatten(-1, (-1, self.value_dim))
        out = self.out_norm(out) * torch.nn.functional.silu(gate.float())
        return self.out_proj(out.to(mixed.dtype).flatten(1)[:, None])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: Any = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        own["conv1d.weight"] = self.conv1d.weight
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "gates", "out_norm", "out_proj"):
            state |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        # Ranks divide each of these row ranges, not their sequence.
        for name, widths in (
            ("in_proj.weight", [*self.qkv_widths, self.widths[1]]),
            ("gates.weight", [self.value_heads] * 2),
            ("conv1d.weight", self.qkv_widths),
        ):
            rows = ["query", "key", "value", "z"] if len(widths) > 2 else ["beta", "decay"]
            state[prefix + name] = _split_tensor_factory(
                state[prefix + name], widths, rows[: len(widths)], 0
            )
        return state
