"""A layer of gated DeltaNet over packed sequences, behind Megatron's attention interface.

Megatron's own layer takes no packed sequences, and needs flash-linear-attention.

    in_proj      hidden -> queries, keys, values and z
    conv_weight  a causal convolution over the last tokens of each query, key and value channel
    gates        hidden -> how much a token writes (beta) and how much of the state it keeps (decay)
    out_norm     RMSNorm of each value head's output, which z then gates
    out_proj     -> hidden

Tensor-parallel ranks have whole key heads, each with its value heads. States and convolutions begin
anew at each sequence. flash-linear-attention (FLA) computes in BF16 on a GPU, torch in float32
elsewhere; `_mix` and `_mix_with_fla` are the only difference.
"""

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.nn.functional import silu, softplus

from qurl_megatron.learner.sequences import PackedSequences
from qurl_megatron.model.delta_rule import causal_conv, chunk_plan, gated_delta_rule


@functools.cache
def has_fla() -> bool:
    """Return whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


class GatedDeltaNet(MegatronModule):
    """The layer on one tensor-parallel rank; its weights are not initialized."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        ranks = self.tp_group.size()
        self._key_dim = config.linear_key_head_dim
        self._value_dim = config.linear_value_head_dim
        self._value_heads = config.linear_num_value_heads // ranks
        keys = config.linear_num_key_heads // ranks * self._key_dim
        values = self._value_heads * self._value_dim
        self._widths = [keys, keys, values, values]  # of queries, keys, values and z
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        by_columns = {
            "init_method": config.init_method,
            "gather_output": False,
            "skip_bias_add": False,
            **linear,
        }
        self.in_proj = build_module(
            submodules.in_proj, config.hidden_size, ranks * sum(self._widths), **by_columns
        )
        self.gates = build_module(
            submodules.in_proj, config.hidden_size, ranks * 2 * self._value_heads, **by_columns
        )
        place = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        channels, width = 2 * keys + values, config.linear_conv_kernel_dim
        self.conv_weight = torch.nn.Parameter(torch.empty(channels, width, **place))
        self.dt_bias = torch.nn.Parameter(torch.empty(self._value_heads, **place))
        # Rounded to BF16, the decay of a state would change by up to a percent.
        place["dtype"] = torch.float32
        self.A_log = torch.nn.Parameter(torch.empty(self._value_heads, **place))
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=self._value_dim,
            eps=config.layernorm_epsilon,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            ranks * values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Mix the tokens of each sequence; [tokens / ranks, 1, hidden] as input and as output.

        Args:
            packed_seq_params: its padded bounds of the sequences are on the host.
        """
        mixed = self.in_proj(hidden_states)[0].squeeze(1)
        beta, decay = self.gates(hidden_states)[0].squeeze(1).chunk(2, dim=-1)
        beta = beta.sigmoid()
        decay = -self.A_log.exp() * softplus(decay.float() + self.dt_bias.float())
        qkv, gate = mixed.split([sum(self._widths[:3]), self._widths[3]], dim=-1)
        uses_fla = qkv.is_cuda and qkv.dtype == torch.bfloat16 and has_fla()
        mix = self._mix_with_fla if uses_fla else self._mix

        def mix_whole(qkv: Tensor, decay: Tensor, beta: Tensor, whole: PackedSeqParams) -> Tensor:
            return mix(qkv, decay, beta, whole.cu_seqlens_q_padded)

        attended = packed_seq_params.mix(mix_whole, qkv, decay, beta)
        gate = silu(gate.unflatten(-1, (-1, self._value_dim)).float())
        gated = (self.out_norm(attended.to(mixed.dtype)) * gate).to(mixed.dtype)
        return self.out_proj(gated.flatten(1)[:, None])

    def _mix(self, qkv: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor) -> Tensor:
        """Return [tokens, value heads, value channels] of the packed sequences between bounds."""
        plan = chunk_plan(tuple(bounds.tolist()), qkv.device)
        qkv = silu(causal_conv(qkv, self.conv_weight, plan.since))
        query, key, value = self._heads(qkv)
        return gated_delta_rule(query, key, value, decay, beta, plan)[0]

    def _mix_with_fla(self, qkv: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor) -> Tensor:
        """Return the result of `_mix` in BF16, by FLA's kernels, which take a batch of one pack."""
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        bounds = bounds.long().unique_consecutive()  # without empty sequences
        on_device = bounds.to(qkv.device, non_blocking=True)
        sequences = {"cu_seqlens": on_device, "cu_seqlens_cpu": bounds}
        qkv, _ = causal_conv1d(qkv[None], self.conv_weight, activation="silu", **sequences)
        query, key, value = self._heads(qkv)
        attended, _ = chunk_gated_delta_rule(
            query, key, value, decay[None], beta[None], use_qk_l2norm_in_kernel=True, **sequences
        )
        return attended[0]

    def _heads(self, qkv: Tensor) -> Iterator[Tensor]:
        """Yield queries, keys and values, [..., heads, channels of a head]."""
        channels = (self._key_dim, self._key_dim, self._value_dim)
        for part, own in zip(qkv.split(self._widths[:3], dim=-1), channels, strict=True):
            yield part.unflatten(-1, (-1, own))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: Any = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Return the parameters as Megatron's checkpoints take them, the same on any layout."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv_weight": self.conv_weight}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
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
        for name, widths in (
            ("in_proj.weight", self._widths),
            ("gates.weight", [self._value_heads] * 2),
            ("conv_weight", self._widths[:3]),
        ):
            state[prefix + name] = self._by_parts(state[prefix + name], widths)
        return state

    def _by_parts(self, whole: ShardedTensor, widths: list[int]) -> ShardedTensorFactory:
        """Return a parameter that stacks several tensors, in the form that checkpoints take.

        Ranks divide each of the tensors. In the checkpoint the query rows of all ranks come first,
        then their key rows, and so on. So any number of ranks finds its own rows.
        """
        rank, ranks = self.tp_group.rank(), self.tp_group.size()

        def build(key: str, data: Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
            parts, first = [], 0
            for rows in data.split(widths):
                offset = (first * ranks + rank * len(rows), *[0] * (data.dim() - 1))
                parts.append(
                    ShardedTensor(
                        key,
                        rows,
                        rows.dtype,
                        tuple(rows.shape),
                        whole.global_shape,
                        offset,
                        None,  # the parts form no regular grid
                        replica_id=replica_id,
                    )
                )
                first += len(rows)
            return parts

        return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)
