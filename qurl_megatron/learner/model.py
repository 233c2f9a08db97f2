"""The Megatron model of a policy, this rank's chunks of it, and the experts that they choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.learner import layers
from qurl_megatron.learner.logprobs import logprobs_and_entropy
from qurl_megatron.learner.sequences import PackedSequences
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import Rule

_EXTRA_STATE = "._extra_state"  # in the names of state that is not a parameter


def build_chunks(
    architecture: Architecture,
    learner: LearnerConfig,
    model: Callable[..., PolicyModel],
) -> list[PolicyModel]:
    """Build this rank's chunks of the model, one per virtual stage, without weights.

    Megatron's parallel state identifies the rank. Call this within `megatron_runtime()`.
    """
    num_virtual_stages = virtual_stages(learner)
    dtype = torch.bfloat16 if learner.dtype == "bfloat16" else torch.float32
    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=learner.tensor_parallel_size,
        pipeline_model_parallel_size=learner.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=num_virtual_stages,
        num_layers_in_last_pipeline_stage=learner.layers_in_last_pipeline_stage,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        context_parallel_size=learner.context_parallel_size,
        sequence_parallel=learner.tensor_parallel_size > 1,
        **expert_fields(architecture, learner),
        calculate_per_token_loss=True,  # no division by micro batches, no average over ranks
        finalize_model_grads_func=_finalize_gradients,
        **_family(architecture).transformer_config_fields(learner, architecture),
    )
    if architecture.rope_scaling:
        from qurl_megatron.learner.rope_scaling import channel_factors

        vars(config).update(channel_factors(architecture.rope_scaling))
    # There is no dropout and no random initialization, so no random state has to be forked.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    chunks = [
        model(config, architecture, virtual_stage)
        for virtual_stage in (range(num_virtual_stages) if num_virtual_stages else [None])
    ]
    for chunk in chunks:
        layers.fuse_gradients(chunk)
    for _, rule, _, parameter in parameters_of(chunks, architecture):
        # Megatron marks shards only when it initializes them. The gradient norm would count an
        # unmarked shard on one tensor-parallel rank alone.
        parameter.tensor_model_parallel = rule.tensors[0].partition_dim is not None  # type: ignore[attr-defined]
        if rule.of_experts:
            # Megatron then reduces gradients over the expert's own ranks. It sets no mark where
            # every rank has all experts, though tensor-parallel ranks give them other tokens.
            parameter.allreduce = False  # type: ignore[attr-defined]
    return chunks


def _family(architecture: Architecture) -> ModuleType:
    """Return the module that has the layers of a model's family, and Megatron's fields of them."""
    if architecture.delta_net is None:
        return layers
    from qurl_megatron.learner import delta_net

    return delta_net


def _finalize_gradients(chunks: Any, num_tokens: Tensor | None = None, **options: Any) -> None:
    """Complete the gradients of a minibatch without dividing them by the number of tokens.

    To read that number, Megatron would wait for the GPU.
    """
    finalize_model_grads(chunks, None, **options)


def parameters_of(
    chunks: list[PolicyModel], architecture: Architecture
) -> Iterator[tuple[str, Rule, int | None, torch.nn.Parameter]]:
    """Yield name in the chunk, rule, layer number in the whole model, and parameter.

    Parameters without a Hugging Face counterpart are left out.
    """
    experts = parallel_state.get_expert_model_parallel_group()
    first_expert = experts.rank() * (architecture.num_experts // experts.size())
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name in chunk.extra_parameters:
                continue
            tied = name == "output_layer.weight" and architecture.tie_word_embeddings
            # The last stage's copy of a tied embedding follows the embedding's rule.
            rule, layer = weight_map.find_megatron(
                "embedding.word_embeddings.weight" if tied else name, first_expert=first_expert
            )
            if layer is not None:  # Megatron counts from 1
                layer = chunk.decoder.layers[layer].layer_number - 1
            yield name, rule, layer, parameter


def tensor_parallel_place(rule: Rule) -> tuple[int, int]:
    """Return this rank's place among the ranks that share a rule's parameter, and their number."""
    group = parallel_state.get_tensor_model_parallel_group()
    if rule.of_experts:
        group = parallel_state.get_expert_tensor_parallel_group()
    return group.rank(), group.size()


def expert_fields(architecture: Architecture, learner: LearnerConfig) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that describe experts; none if dense."""
    if not architecture.num_experts:
        return {}
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_ffn_hidden_size": architecture.moe_intermediate_size,
        "moe_router_topk": architecture.experts_per_token,
        "moe_router_pre_softmax": not architecture.normalize_topk,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": architecture.shared_intermediate_size or None,
        "moe_shared_expert_gate": bool(architecture.shared_intermediate_size),
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": learner.expert_parallel_size,
        "expert_tensor_parallel_size": learner.expert_tensor_parallel_size,
    }


def virtual_stages(learner: LearnerConfig) -> int | None:
    """Return the number of virtual stages in Megatron's form: None instead of 1."""
    size = learner.virtual_pipeline_parallel_size
    return size if size > 1 else None


def _ignore_extra_state(model: PolicyModel, keys: Any) -> None:
    """Let a model load what `PolicyModel.sharded_state_dict` returns."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if model.is_saved(key)]


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns hidden states, which `score` turns into log-probs."""

    extra_parameters: frozenset[str] = frozenset()  # parameters without a Hugging Face counterpart

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        virtual_stage: int | None,
        block: TransformerBlockSubmodules | None = None,
    ) -> None:
        """Build the model; `block` has other layers than those of its family."""
        stage = {"ignore_virtual": False, "vp_stage": virtual_stage}
        super().__init__(
            config,
            block or _family(architecture).block_spec(config, virtual_stage),
            vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_percent=(
                1.0 if architecture.delta_net is None else architecture.delta_net.rotary_factor
            ),
            rotary_base=architecture.rope_theta,
            vp_stage=virtual_stage,
        )
        self._architecture = architecture
        self.register_load_state_dict_post_hook(_ignore_extra_state)
        if architecture.rope_scaling is not None:
            from qurl_megatron.learner.rope_scaling import scaled_frequencies

            rotary = self.rotary_pos_emb
            rotary.inv_freq = scaled_frequencies(architecture, rotary.inv_freq.device)

    def sharded_state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Return the parameters as Megatron's checkpoints take them, the same for all layers.

        Transformer Engine's layers also keep FP8 settings, which local layers lack. They are left
        out.
        """
        state = super().sharded_state_dict(*arguments, **keywords)
        return {name: value for name, value in state.items() if self.is_saved(name)}

    def is_saved(self, name: str) -> bool:
        """Return whether checkpoints hold a tensor of this name."""
        return _EXTRA_STATE not in name

    def _preprocess(self, *, packed_seq_params: PackedSequences, **given: Any) -> tuple[Any, ...]:
        """Return what Megatron does, with the rotary table's row of each token if it needs one."""
        states, rotary, *others = super()._preprocess(packed_seq_params=packed_seq_params, **given)
        positions = packed_seq_params.positions
        return states, rotary if positions is None else rotary[positions], *others

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def score(
        self, hidden: Tensor, rows: TrainBatch, scored: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        """Return log-probs and entropies [1, tokens] float32; 0 where the loss mask is False.

        Args:
            hidden: [tokens / tensor-parallel ranks, 1, hidden], the last stage's output.
            rows: [1, tokens]; each position describes the token after the one in `hidden`. With
                sampling masks, scores are of the distributions over the candidates.
            scored: [scored tokens] int64 on the CPU, where the loss mask is True.
            temperature: divides the logits.
        """
        rule, _ = weight_map.find_megatron("output_layer.weight")
        (part,) = rule.tensors
        vocabulary, _ = weight_map.part_index(
            rule, part, self._architecture, self.tp_group.rank(), self.tp_group.size()
        )
        weight = (
            self.shared_embedding_or_output_weight()
            if self._architecture.tie_word_embeddings
            else self.output_layer.weight
        )
        logprobs, entropy = logprobs_and_entropy(
            hidden.squeeze(1),
            weight[: vocabulary.stop - vocabulary.start],
            rows.tokens.squeeze(0),
            scored,
            rows.mask_ids,
            temperature=temperature,
            first_row=vocabulary.start,
            group=self.tp_group,
            # By the padded rows, whose number is the same on every rank.
            tile=device.logit_tile(len(weight), whole=rows.mask_ids is not None),
        )
        return logprobs[None], entropy[None]


class RecordedChoice:
    """A substitute for Megatron's `RouterReplay` in one router."""

    def __init__(self, replays: bool, counts: Tensor) -> None:
        """Store the arguments; changed and known choices are added to `counts`, [2] int64."""
        self._replays = replays
        self._counts = counts
        self.recorded: Tensor | None = None  # [tokens, experts per token] int64; -1: not known

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of each token's experts, `[tokens, topk]`.

        `scores` `[tokens, experts]` are the router's; `choose` makes the learner's own choice.
        """
        values, own = choose(scores, topk, num_groups, group_topk)
        if self.recorded is None:
            return values, own
        recorded = self.recorded
        if len(recorded) != len(scores):  # sequence parallelism divides the tokens over ranks
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            recorded = recorded.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        known = recorded[:, 0] >= 0
        # Sorted, because the order of a token's experts does not matter.
        changed = (recorded.sort(dim=1)[0] != own.sort(dim=1)[0]).any(dim=1)
        self._counts += torch.stack([(changed & known).sum(), known.sum()])
        if not self._replays:
            return values, own
        experts = torch.where(known[:, None], recorded, own)
        return scores.gather(1, experts), experts


class Routing:
    """The experts that the engine chose, for all routers of this rank.

    A server computes in low precision, so its router chooses other experts than the learner's for
    some tokens. A token sampled with one expert is then trained with another. There are two ways to
    deal with that:

    - Compare: the learner chooses for itself, and counts the tokens for which it chose otherwise.
    - Replay: it takes the engine's experts. Their weights are still the learner's: a softmax over
      the learner's own logits of these experts, through which the router is trained.

    A token whose experts are not known, such as padding, gets the learner's own.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], replays: bool) -> None:
        """Put a `RecordedChoice` into every router of the model's chunks."""
        self._counts = torch.zeros(2, dtype=torch.int64, device=device.device())
        self._routers: dict[int, list[Any]] = {}  # by chunk
        for chunk in chunks:
            routers = [each for each in chunk.modules() if isinstance(each, TopKRouter)]
            for router in routers:
                router.router_replay = RecordedChoice(replays, self._counts)  # type: ignore[assignment]
            self._routers[id(chunk)] = routers

    def expect(self, chunk: torch.nn.Module, experts: Tensor | None) -> None:
        """Give the routers of a chunk what the engine chose for the inputs of its next pass.

        Args:
            experts: [tokens, layers of the whole model, experts per token] int64; None: not
                recorded.
        """
        for router in self._routers[id(chunk)]:
            layer = router.layer_number - 1  # Megatron counts from 1
            router.router_replay.recorded = None if experts is None else experts[:, layer]

    def reset_counts(self) -> None:
        """Count from 0."""
        self._counts.zero_()

    def counts(self) -> tuple[int, int]:
        """Return how many of the engine's choices are not the learner's, and how many are known.

        A choice is that of one token in one layer. Collective over all learner ranks.
        """
        total = self._counts.clone()
        dist.all_reduce(total)
        changed, known = total.tolist()
        return changed, known
