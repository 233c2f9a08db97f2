"""The layers of hybrids: gated DeltaNet over packed sequences, and gated attention between them.

Megatron's own layer of DeltaNet takes no packed sequences, and needs flash-linear-attention. Here
it has these parts, behind Megatron's attention interface:

    in_proj      hidden -> queries, keys, values and z
    conv_weight  a causal convolution over the last tokens of each query, key and value channel
    gates        hidden -> how much a token writes (beta) and how much of the state it keeps (decay)
    out_norm     RMSNorm of each value head's output, which z then gates
    out_proj     -> hidden

Tensor-parallel ranks have whole key heads, each with its value heads. States and convolutions begin
anew at each sequence. flash-linear-attention (FLA) computes in BF16 on a GPU, torch in float32
elsewhere; `_mix` and `_mix_with_fla` are the only difference.
"""

import copy
import functools
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.nn.functional import silu, softplus

from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.device import accelerator
from qurl_megatron.learner import layers
from qurl_megatron.learner.layers import RMSNorm, gpt_layer_specs
from qurl_megatron.learner.sequences import PackedSequences
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.delta_rule import causal_conv, chunk_plan, gated_delta_rule


def block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's specification of the layers in one chunk of this pipeline stage."""
    attention = layers.local_layer(config, ZeroCentredRMSNorm)
    attention.submodules.sharded_state_dict_keys_map = {}
    linear = _linear_layer(attention)
    attention.submodules.self_attention.module = GatedSelfAttention
    first = get_transformer_layer_offset(config, virtual_stage)
    number = get_num_layers_to_build(config, virtual_stage)
    kinds: Any = config.linear_attention_freq  # of all layers: 1 for linear attention, else 0
    return TransformerBlockSubmodules(
        layer_specs=[linear if kind else attention for kind in kinds[first : first + number]],
        layer_norm=ZeroCentredRMSNorm,
    )


def _linear_layer(layer: ModuleSpec) -> ModuleSpec:
    """Return the specification of a layer with gated DeltaNet in place of attention."""
    linear = copy.deepcopy(layer)
    products = layer.submodules.self_attention.submodules
    linear.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=products.linear_qkv, out_norm=RMSNorm, out_proj=products.linear_proj
        ),
    )
    return linear


@functools.cache
def has_fla() -> bool:
    """Return whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


def transformer_config_fields(learner: LearnerConfig, architecture: Architecture) -> dict[str, Any]:
    """Return what `layers.transformer_config_fields` does, and what describes linear attention."""
    hybrid = architecture.delta_net
    assert hybrid is not None
    if accelerator() == "cuda" and not has_fla() and dist.get_rank() == 0:
        print(
            "qurl: flash-linear-attention is not installed: linear attention takes more time "
            "and memory; install requirements-gpu.txt",
            file=sys.stderr,
        )
    return {
        **layers.transformer_config_fields(learner, architecture),
        "linear_attention_freq": [int(linear) for linear in hybrid.layers],
        "linear_conv_kernel_dim": hybrid.conv_width,
        "linear_key_head_dim": hybrid.key_dim,
        "linear_value_head_dim": hybrid.value_dim,
        "linear_num_key_heads": hybrid.key_heads,
        "linear_num_value_heads": hybrid.value_heads,
        "attention_output_gate": True,
    }


class ZeroCentredRMSNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + weight, which it computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.weight.float()
        normalized = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, scale, self.eps)
        return normalized.to(x.dtype)


class GatedSelfAttention(gpt_layer_specs.SelfAttention):  # type: ignore[name-defined]
    """Attention with a gate for each channel of its output; q_proj computes the gates too.

    In a key-value head's group, the rows of each query head are followed by those of its gate; then
    come the key head and the value head. This is the order of the checkpoint. Megatron's own layer
    has all gates behind all queries, and does not divide them where ranks share a key-value head.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates, [tokens, 1, heads on this rank, head_dim]."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, ranks = self.config.num_query_groups, self.world_size
        sharing = max(1, ranks // groups)  # ranks to a key-value head
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed)
            mixed = mixed.chunk(groups, dim=-1)[self.tp_group.rank() // sharing]
        heads = mixed.unflatten(
            -1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head)
        )
        gated, key, value = heads.split([heads.shape[-2] - 2, 1, 1], dim=-2)
        query, gate = (each.flatten(2, 3) for each in gated.unflatten(-2, (-1, 2)).unbind(-2))
        if sharing > 1:
            own = self.tp_group.rank() % sharing
            query, gate = (each.chunk(sharing, dim=2)[own] for each in (query, gate))
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(3)), value.squeeze(3), gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Gate the output; Megatron's is compiled, which a fork of the launcher cannot do."""
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


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
