"""The full-precision policy: a Megatron-core model that scores tokens and takes optimizer steps.

Every rank makes the same calls with the same global batch; what each of them computes follows from
its place in tensor, pipeline and data parallelism. Invariants:

- A call's result is the same on every rank.
- `update` follows the gradient of the sum of the loss over all rows, whatever the number of micro
  batches and data-parallel ranks: nothing is averaged behind the loss function's back.
- Masters are float32 and are the checkpoint's values after `transform`, never rounded; the forward
  pass uses them rounded to the compute dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.learner.logprobs import logprobs_and_entropy
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import Weights
from qurl_megatron.model.weight_map import Rule

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(current_logprobs [rows, time], entropy [rows, time], micro batch, loss_weights [rows, time]) ->
(loss summed over tokens, named sums over tokens). Only masked-in positions hold log-probs and
entropies; the others are 0. Of another model than `Policy`, what its `score` returns comes first.
"""

Transform = Callable[[str, Tensor], Tensor]
"""(Hugging Face name, this rank's float32 part of the tensor) -> its new values, element-wise."""


@dataclass(frozen=True)
class Update:
    """What one optimizer step did; the same on every rank."""

    loss: float  # summed over all rows
    grad_norm: float  # before clipping
    learning_rate: float
    stats: dict[str, float]  # the loss function's sums, summed over all rows


@dataclass(frozen=True)
class _MicroBatch:
    rows: TrainBatch  # trimmed after the last masked-in token, on this rank's device
    loss_weights: Tensor  # [rows, time] float32
    index: Tensor  # [rows] int64, row numbers in the global batch


class Learner:
    """The policy, its optimizer, and this rank's part in both.

    `chunks` are this stage's model, in as many parts as it has virtual stages.
    """

    def __init__(
        self,
        model_dir: Path,
        learner: LearnerConfig,
        optimizer: OptimizerConfig,
        *,
        transform: Transform | None = None,
        model: type[Policy] | None = None,
    ) -> None:
        """Build the model, a `Policy` or what derives from it, and load `model_dir` into it.

        Joins the default process group if the caller has made one, or else makes it.

        Raises:
            ArchitectureError: the model or the layout does not fit; one line.
        """
        self.architecture = Architecture.from_directory(model_dir)
        self.architecture.check_layout(
            learner.tensor_parallel_size,
            learner.pipeline_parallel_size,
            learner.virtual_pipeline_parallel_size,
            learner.layers_in_last_pipeline_stage,
        )
        weights = Weights(model_dir, self.architecture)
        device.limit_threads(learner.threads_per_rank)
        self._owns_world = not dist.is_initialized()
        if self._owns_world:
            device.initialize_distributed()
        if dist.get_world_size() != learner.world_size:
            raise ArchitectureError(
                f"{dist.get_world_size()} learner ranks, but tensor x pipeline x data parallel "
                f"sizes are {learner.tensor_parallel_size} x {learner.pipeline_parallel_size} x "
                f"{learner.data_parallel_size}; start {learner.world_size} ranks"
            )
        self._micro_batch_size = learner.micro_batch_size
        self._interleaved = learner.virtual_pipeline_parallel_size > 1
        with device.megatron_runtime():
            parallel_state.initialize_model_parallel(
                learner.tensor_parallel_size,
                learner.pipeline_parallel_size,
                virtual_pipeline_model_parallel_size=_virtual_stages(learner),
                create_gloo_process_groups=False,
            )
            self._dtype = _compute_dtype(learner)
            self.chunks = self._wrap(build_chunks(self.architecture, learner, model or Policy))
            self._make_optimizer(optimizer)
            self._load(weights, transform)

    def logprobs_and_entropy(
        self, tokens: Tensor, *, temperature: float, loss_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score `tokens` [batch, time] with the current weights, without gradients.

        Args:
            temperature: divides the logits.
            loss_mask: [batch, time] bool, the positions to score; None scores all but the first.

        Returns:
            Log-probs and entropies [batch, time] float32 on the CPU, position t of token t given
            those before it, 0 where not scored.
        """
        logprobs, entropy = self._scores(2, tokens, loss_mask, temperature)
        return logprobs, entropy

    def values(self, tokens: Tensor, loss_mask: Tensor) -> Tensor:
        """As `logprobs_and_entropy`, of a value model: what it expects before each token."""
        (values,) = self._scores(1, tokens, loss_mask, temperature=1.0)
        return values

    def keep_reference(self) -> None:
        """Keep a copy of the policy as it is now, in the compute dtype, for `as_reference`."""
        self._reference = [parameter.detach().clone() for *_, parameter in self._parameters()]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Within it, `logprobs_and_entropy` scores with the copy that `keep_reference` made."""
        parameters = [parameter for *_, parameter in self._parameters()]
        current = [parameter.data for parameter in parameters]
        try:
            for parameter, kept in zip(parameters, self._reference, strict=True):
                parameter.data = kept
            yield
        finally:
            for parameter, data in zip(parameters, current, strict=True):
                parameter.data = data

    def update(
        self,
        batch: TrainBatch,
        loss_weights: Tensor,
        loss_function: LossFunction,
        *,
        temperature: float,
    ) -> Update:
        """One optimizer step on the sum of `loss_function` over the rows of `batch`.

        Args:
            loss_weights: [batch, time] float32, handed to `loss_function` row by row; they carry
                the normalization over the whole batch.

        Raises:
            FloatingPointError: the gradient norm is not finite; the weights are then spoilt.
        """
        sums: dict[str, Tensor] = {}

        def loss(micro: _MicroBatch, *scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, stats = loss_function(*scores, micro.rows, micro.loss_weights)
            for name, value in {"loss": total, **stats}.items():
                sums[name] = sums.get(name, 0) + value.detach().double()
            # No token counted: with calculate_per_token_loss Megatron then divides by nothing.
            return total, torch.zeros((), dtype=torch.int, device=device.device()), {}

        with device.megatron_runtime():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            micro_batches = self._micro_batches(batch, loss_weights)
            self._run(micro_batches, loss, temperature, forward_only=False)
            self.scheduler.step(increment=1)
            learning_rate = self.optimizer.param_groups[0]["lr"]
            _, grad_norm, _ = self.optimizer.step()
        stats = self._sum_over_copies(sums)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"gradient norm is {grad_norm} at loss {stats['loss']}; the update is spoilt"
            )
        return Update(stats.pop("loss"), float(grad_norm), float(learning_rate), stats)

    def shards(self) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """This rank's shards: rule, layer number in the whole model, parameter.

        Parameters are those of the forward pass, in its dtype; not to be written to. The output
        layer of a tied model is its embedding and does not come a second time.
        """
        for name, rule, layer, parameter in self._parameters():
            if name != "output_layer.weight" or not self.architecture.tie_word_embeddings:
                yield rule, layer, parameter.detach()

    def masters(self) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """As `shards`, in float32: the values the optimizer steps."""
        for name, rule, layer, parameter in self._parameters():
            if name != "output_layer.weight" or not self.architecture.tie_word_embeddings:
                yield rule, layer, self._master(parameter)

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Start over with fresh moments and another schedule; the weights stay."""
        masters = [self._master(parameter) for *_, parameter in self._parameters()]
        with device.megatron_runtime():
            self._make_optimizer(optimizer)
        for master, (*_, parameter) in zip(masters, self._parameters(), strict=True):
            self._master(parameter).copy_(master)

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Weights, optimizer and schedule as Megatron's checkpoints take and give them.

        Tensors are not copied. `loading` makes room for what a fresh optimizer has not got yet.
        Enter `device.megatron_runtime()` around it and what uses it.
        """
        model = {
            f"chunk{number}": chunk.module.sharded_state_dict()
            for number, chunk in enumerate(self.chunks)
        }
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading),
            "optimizer_steps": self.scheduler.num_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a loaded `sharded_state`; rates and decay stay those of this learner."""
        for number, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(state["model"][f"chunk{number}"])
        groups = self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.scheduler.step(increment=state["optimizer_steps"])

    def close(self) -> None:
        """Leave no Megatron state and no process group of the learner's making."""
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        for group in groups:
            if group is not None:  # stands for the default group
                dist.destroy_process_group(group)
        if self._owns_world:
            dist.destroy_process_group()

    # Building

    def _wrap(self, chunks: list[Policy]) -> list[DistributedDataParallel]:
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return [
            DistributedDataParallel(chunk.config, ddp, chunk.to(device.device()))
            for chunk in chunks
        ]

    def _make_optimizer(self, optimizer: OptimizerConfig) -> None:
        config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=optimizer.learning_rate,
            min_lr=0.0,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.epsilon,
            clip_grad=optimizer.clip_grad,
            bf16=self._dtype == torch.bfloat16,
            params_dtype=self._dtype,
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.learning_rate,
            min_lr=0.0,
            lr_warmup_steps=optimizer.warmup_steps,
            lr_decay_steps=optimizer.warmup_steps + 1,  # unused by a constant schedule, but checked
            lr_decay_style="constant",
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @torch.no_grad()
    def _load(self, weights: Weights, transform: Transform | None) -> None:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        for _, rule, layer, parameter in self._parameters():
            parts = []
            for part, hf_name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
                index = weight_map.part_index(rule, part, self.architecture, tp_rank, tp_size)
                master = weights.read(hf_name, index).float()
                parts.append(transform(hf_name, master) if transform else master)
            shard = weight_map.merge(rule, parts, self.architecture, tp_size)
            parameter.copy_(shard)
            self._master(parameter).copy_(shard)

    @staticmethod
    def _master(parameter: Tensor) -> Tensor:
        """The float32 tensor the optimizer steps: a copy beside a bfloat16 parameter."""
        return getattr(parameter, "main_param", parameter).detach()

    def _parameters(self) -> Iterator[tuple[str, Rule, int | None, torch.nn.Parameter]]:
        return parameters_of([chunk.module for chunk in self.chunks], self.architecture)

    # Running

    def _scores(
        self, number: int, tokens: Tensor, loss_mask: Tensor | None, temperature: float
    ) -> Tensor:
        """The `number` tensors that the model's `score` returns: [number, batch, time], CPU."""
        if loss_mask is None:
            loss_mask = torch.ones_like(tokens, dtype=torch.bool)
        nothing = torch.zeros(tokens.shape)
        result = torch.zeros(number, *tokens.shape, device=device.device())

        def keep(micro: _MicroBatch, *scores: Tensor) -> None:
            if self._reports:
                # Added: a row that only fills up stands for one that is not its own.
                for all_rows, of_rows in zip(result, scores, strict=True):
                    time = of_rows.shape[1]
                    all_rows[:, :time].index_add_(0, micro.index.to(result.device), of_rows)

        micro_batches = self._micro_batches(
            TrainBatch(tokens, loss_mask, nothing, nothing, nothing), loss_weights=nothing
        )
        with torch.no_grad(), device.megatron_runtime():
            self._run(micro_batches, keep, temperature, forward_only=True)
        dist.all_reduce(result)  # one rank filled each row, so the sum is exact
        return result.cpu()

    @property
    def _reports(self) -> bool:
        """True on the one rank of each data-parallel copy that speaks for it."""
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    @property
    def _last(self) -> Policy:
        """The chunk whose output is scored, on the last pipeline stage."""
        return self.chunks[-1].module

    def _sum_over_copies(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Named sums of each data-parallel copy's last stage -> their totals, on every rank."""
        mine = {name: float(value) for name, value in sums.items()} if self._reports else {}
        by_rank: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        names = dict.fromkeys(name for rank in by_rank for name in rank)
        return {name: sum(rank.get(name, 0.0) for rank in by_rank) for name in names}

    def _micro_batches(self, batch: TrainBatch, loss_weights: Tensor) -> list[_MicroBatch]:
        """This data-parallel rank's rows, cut into micro batches, each as long as it needs.

        Rows are dealt out by length, so that ranks get even shares and neighbours are alike.
        """
        mask = batch.loss_mask.clone()
        mask[:, 0] = False  # nothing precedes the first token
        times = (mask * torch.arange(mask.shape[1])).amax(1) + 1
        ranks = parallel_state.get_data_parallel_world_size()
        index = times.argsort(stable=True)[parallel_state.get_data_parallel_rank() :: ranks]
        # A rank without rows takes part in the collectives, with a row that is masked out. So do
        # the rows that Megatron's interleaved schedule wants to be there: it takes micro batches in
        # groups, all of one shape.
        unit = 1
        if self._interleaved:
            unit = self._micro_batch_size * parallel_state.get_pipeline_model_parallel_world_size()
        filling = max(unit, -(-len(index) // unit) * unit) - len(index)
        real = torch.arange(len(index) + filling) < len(index)
        index = torch.cat([index, index.new_zeros(filling)])
        times = times[index] * real
        micro_batches = []
        for start in range(0, len(index), self._micro_batch_size):
            some = slice(start, start + self._micro_batch_size)
            time = max(2, int(times.max() if self._interleaved else times[some].max()))

            def cut(tensor: Tensor) -> Tensor:
                values = tensor[index[some], :time]  # noqa: B023
                masked_out = ~real[some].view(-1, 1)  # noqa: B023
                return values.masked_fill(masked_out, 0).to(device.device())

            trimmed = dataclasses.replace(batch, loss_mask=mask).map(cut)
            micro_batches.append(_MicroBatch(trimmed, cut(loss_weights), index[some]))
        return micro_batches

    def _run(
        self,
        micro_batches: list[_MicroBatch],
        consume: Callable[..., Any],
        temperature: float,
        *,
        forward_only: bool,
    ) -> None:
        """Megatron's schedule over the micro batches.

        `consume` meets each micro batch and its scores [rows, time] on the last pipeline stage
        and returns what the schedule expects of a loss function.
        """

        def forward_step(
            waiting: Iterator[_MicroBatch], model: DistributedDataParallel
        ) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(waiting)
            hidden = model(
                input_ids=micro.rows.tokens[:, :-1], position_ids=None, attention_mask=None
            )

            def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
                return consume(micro, *self._last.score(hidden, micro.rows, temperature))

            return hidden, finish

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=max(micro.loss_weights.shape[1] for micro in micro_batches) - 1,
            micro_batch_size=self._micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def build_chunks(
    architecture: Architecture, learner: LearnerConfig, model: type[Policy]
) -> list[Policy]:
    """This rank's part of the model, in as many chunks as its stage is cut into; no weights yet.

    Its place comes from Megatron's parallel state. Enter `device.megatron_runtime()` around it.
    """
    virtual_stages, dtype = _virtual_stages(learner), _compute_dtype(learner)
    pipeline_parallel_size = learner.pipeline_parallel_size
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
        pipeline_model_parallel_size=pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages,
        num_layers_in_last_pipeline_stage=learner.layers_in_last_pipeline_stage,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        # Each micro batch has its own time, unless the interleaved schedule forbids it.
        variable_seq_lengths=pipeline_parallel_size > 1 and not virtual_stages,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths insists, also when dense
        calculate_per_token_loss=True,  # no division by micro batches, no average over ranks
        finalize_model_grads_func=finalize_model_grads,
        **(_RECOMPUTE if learner.recompute_activations else {}),
        **device.transformer_config_fields(),
    )
    # No dropout and no random initialization: no random state to fork.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    chunks = []
    for virtual_stage in range(virtual_stages or 1):
        chunks.append(model(config, architecture, virtual_stage if virtual_stages else None))
    for _, rule, _, parameter in parameters_of(chunks, architecture):
        # Megatron marks them as it initializes them; unmarked, they count once in the norm.
        parameter.tensor_model_parallel = rule.tensors[0].partition_dim is not None  # type: ignore[attr-defined]
    return chunks


def parameters_of(
    chunks: list[Policy], architecture: Architecture
) -> Iterator[tuple[str, Rule, int | None, torch.nn.Parameter]]:
    """Name in its chunk, rule, layer number in the whole model, parameter.

    Of those that a Hugging Face model has.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name in chunk.own_parameters:
                continue
            tied = name == "output_layer.weight" and architecture.tie_word_embeddings
            # The last stage's copy of a tied embedding goes by the embedding's rule.
            rule, layer = weight_map.find_megatron(
                "embedding.word_embeddings.weight" if tied else name
            )
            if layer is not None:  # Megatron counts from 1
                layer = chunk.decoder.layers[layer].layer_number - 1
            yield name, rule, layer, parameter


def _virtual_stages(learner: LearnerConfig) -> int | None:
    """As Megatron wants it: None where stages are not cut."""
    size = learner.virtual_pipeline_parallel_size
    return size if size > 1 else None


def _compute_dtype(learner: LearnerConfig) -> torch.dtype:
    return torch.bfloat16 if learner.dtype == "bfloat16" else torch.float32


# Each layer is a unit: its input is kept, and its forward pass made again in the backward pass.
_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


class Policy(GPTModel):
    """GPTModel whose last stage ends in hidden states, to be scored without whole logits."""

    own_parameters: frozenset[str] = frozenset()  # names of those no Hugging Face model has

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, virtual_stage: int | None
    ) -> None:
        where = {"ignore_virtual": False, "vp_stage": virtual_stage}
        super().__init__(
            config,
            device.block_spec(config, virtual_stage),
            vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            vp_stage=virtual_stage,
        )
        self._architecture = architecture
        if architecture.rope_scaling is not None:
            rotary = self.rotary_pos_emb
            rotary.inv_freq = rotary._apply_scaling(
                rotary.inv_freq, **dataclasses.asdict(architecture.rope_scaling)
            )

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def score(self, hidden: Tensor, rows: TrainBatch, temperature: float) -> tuple[Tensor, ...]:
        """Log-probs and entropy [rows, time] float32 of the masked-in tokens, elsewhere 0.

        `hidden` [time - 1, rows, hidden] is the last stage's output; `loss_mask` excludes the
        first token.
        """
        rule, _ = weight_map.find_megatron("output_layer.weight")
        (part,) = rule.tensors
        run, _ = weight_map.part_index(
            rule, part, self._architecture, self.tp_group.rank(), self.tp_group.size()
        )
        weight = (
            self.shared_embedding_or_output_weight()
            if self._architecture.tie_word_embeddings
            else self.output_layer.weight
        )
        mask = rows.loss_mask
        logprobs, entropy = logprobs_and_entropy(
            hidden.transpose(0, 1)[mask[:, 1:]],
            weight[: run.stop - run.start],
            rows.tokens[mask],
            temperature=temperature,
            first_row=run.start,
            group=self.tp_group,
            chunk_elements=device.logit_chunk_elements(run.stop - run.start),
        )
        nothing = torch.zeros(mask.shape, device=mask.device)
        return nothing.masked_scatter(mask, logprobs), nothing.masked_scatter(mask, entropy)
