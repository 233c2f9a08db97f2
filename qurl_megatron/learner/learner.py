"""The learner: a full-precision Megatron-core policy that scores tokens and takes optimizer steps.

Every rank makes the same calls with the same global batch. Its place in tensor, pipeline and data
parallelism decides what it computes. Invariants:

- Every call returns the same result on every rank, or raises the same `NonFinite`.
- `update` follows the gradient of the loss summed over all rows, whatever the number of micro
  batches and data-parallel ranks. Nothing else averages or rescales it.
- Master weights are float32: the checkpoint's values after `transform`, never rounded. The forward
  pass uses them rounded to the compute dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.learner.model import (
    Policy,
    build_chunks,
    compute_dtype,
    parameters_of,
    virtual_stages,
)
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import Weights
from qurl_megatron.model.weight_map import Rule

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""A loss: (current_logprobs, entropy, micro batch, loss_weights) -> (loss, named sums).

All tensors are [rows, time]. Log-probs and entropies are 0 where the loss mask is False. The loss
and the named sums are summed over tokens. A model other than `Policy` passes what its `score`
returns in place of log-probs and entropies.
"""

Transform = Callable[[str, Tensor], Tensor]
"""An element-wise map: (Hugging Face name, this rank's float32 shard) -> its new values."""


class NonFinite(device.SharedError, FloatingPointError):
    """A tensor of one rank holds NaN or infinity. The text names both, and is one line."""


@dataclass(frozen=True)
class Update:
    """The result of one optimizer step, the same on every rank."""

    loss: float  # summed over all rows
    grad_norm: float  # before clipping
    learning_rate: float
    stats: dict[str, float]  # the loss function's named sums, summed over all rows


@dataclass(frozen=True)
class _MicroBatch:
    rows: TrainBatch  # cut after the last token in the loss mask, on this rank's device
    loss_weights: Tensor  # [rows, time] float32
    index: Tensor  # [rows] int64, row numbers in the global batch


class _Suspect(NamedTuple):
    order: tuple[int, ...]  # a tensor may have spoilt those of a higher order
    name: str
    tensor: Tensor


class Learner:
    """The policy and its optimizer, as sharded on this rank.

    `chunks` holds one model for each virtual stage of this pipeline stage.
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
        """Build the model and load the Hugging Face directory `model_dir` into it.

        The default process group is created if the caller has not done so.

        Args:
            transform: maps the float32 master weights at load.
            model: the class of the model; None for `Policy`.

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
        with megatron_runtime():
            parallel_state.initialize_model_parallel(
                learner.tensor_parallel_size,
                learner.pipeline_parallel_size,
                virtual_pipeline_model_parallel_size=virtual_stages(learner),
                create_gloo_process_groups=False,
            )
            self._dtype = compute_dtype(learner)
            self.chunks = self._wrap(build_chunks(self.architecture, learner, model or Policy))
            self._make_optimizer(optimizer)
            self._load(weights, transform)

    def logprobs_and_entropy(
        self, tokens: Tensor, *, temperature: float, loss_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score `tokens` [batch, time] with the current weights, without gradients.

        Args:
            temperature: divides the logits.
            loss_mask: [batch, time] bool, the positions to score; None: all but the first.

        Returns:
            Natural log-probs and entropies [batch, time] float32 on the CPU. Position t belongs to
            token t given the tokens before it; positions that are not scored are 0.

        Raises:
            NonFinite: a score is not finite.
        """
        logprobs, entropy = self._scores(2, tokens, loss_mask, temperature)
        return logprobs, entropy

    def values(self, tokens: Tensor, loss_mask: Tensor) -> Tensor:
        """Score `tokens` [batch, time] with a value model, without gradients.

        Returns:
            Values [batch, time] float32 on the CPU. Position t holds the expected return before
            token t is sampled; it is 0 where `loss_mask` is False.
        """
        (values,) = self._scores(1, tokens, loss_mask, temperature=1.0)
        return values

    def keep_reference(self) -> None:
        """Copy the current policy, in the compute dtype, for `as_reference`."""
        self._reference = [parameter.detach().clone() for *_, parameter in self._parameters()]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Score with the weights from `keep_reference` within this context."""
        parameters = [parameter for *_, parameter in self._parameters()]
        current = [parameter.data for parameter in parameters]
        try:
            for parameter, data in zip(parameters, self._reference, strict=True):
                parameter.data = data
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
        """Take one optimizer step on the sum of `loss_function` over the rows of `batch`.

        Args:
            loss_weights: [batch, time] float32, passed to `loss_function` row by row. They include
                the normalization over the whole batch.
            temperature: divides the logits.

        Raises:
            NonFinite: the loss or the gradient norm is not finite; the weights are then unusable.
        """
        sums: dict[str, Tensor] = {}

        def loss(micro: _MicroBatch, *scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, stats = loss_function(*scores, micro.rows, micro.loss_weights)
            for name, value in {"loss": total, **stats}.items():
                sums[name] = sums.get(name, 0) + value.detach().double()
            # A token count of 0 keeps Megatron from dividing the gradients by it.
            return total, torch.zeros((), dtype=torch.int, device=device.device()), {}

        with megatron_runtime():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            micro_batches = self._micro_batches(batch, loss_weights)
            self._run(micro_batches, loss, temperature, forward_only=False)
            self.scheduler.step(increment=1)
            learning_rate = self.optimizer.param_groups[0]["lr"]
            _, grad_norm, _ = self.optimizer.step()
        stats = self._sum_over_replicas(sums)
        # Both are the same on every rank, so no further exchange is needed while they are finite.
        if not (math.isfinite(grad_norm) and math.isfinite(stats["loss"])):
            self._refuse(f"the gradient norm is {grad_norm}", self._losses_and_gradients(sums))
        return Update(stats.pop("loss"), float(grad_norm), float(learning_rate), stats)

    def shards(self) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield this rank's shards: rule, layer number in the whole model, parameter.

        The parameters are those of the forward pass, in its dtype; do not write to them. The output
        layer of a tied model is left out, because it is the embedding.
        """
        for name, rule, layer, parameter in self._parameters():
            if name != "output_layer.weight" or not self.architecture.tie_word_embeddings:
                yield rule, layer, parameter.detach()

    def masters(self) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield what `shards` yields, but with the optimizer's float32 master weights."""
        for name, rule, layer, parameter in self._parameters():
            if name != "output_layer.weight" or not self.architecture.tie_word_embeddings:
                yield rule, layer, self._master(parameter)

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replace the optimizer by one with fresh moments and schedule; keep the weights."""
        masters = [self._master(parameter) for *_, parameter in self._parameters()]
        with megatron_runtime():
            self._make_optimizer(optimizer)
        for master, (*_, parameter) in zip(masters, self._parameters(), strict=True):
            self._master(parameter).copy_(master)

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Return weights, optimizer and schedule as a sharded state of Megatron's checkpoints.

        Tensors are not copied. `loading` allocates the moments that a fresh optimizer lacks. Call
        this, and use the result, within `megatron_runtime()`.
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
        """Load a `sharded_state`, but keep this learner's own learning rate and weight decay."""
        for number, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(state["model"][f"chunk{number}"])
        groups = self.optimizer.param_groups
        own_settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, own_settings, strict=True):
            group.update(settings)
        self.scheduler.step(increment=state["optimizer_steps"])

    def close(self) -> None:
        """Destroy Megatron's parallel state and the process groups that this learner created."""
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        for group in groups:
            if group is not None:  # None stands for the default group
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
            # A constant schedule ignores it, but Megatron checks it.
            lr_decay_steps=optimizer.warmup_steps + 1,
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
        """Return the float32 tensor that the optimizer updates; a bfloat16 parameter has a copy."""
        return getattr(parameter, "main_param", parameter).detach()

    def _parameters(self) -> Iterator[tuple[str, Rule, int | None, torch.nn.Parameter]]:
        return parameters_of([chunk.module for chunk in self.chunks], self.architecture)

    # Running

    def _scores(
        self, num_scores: int, tokens: Tensor, loss_mask: Tensor | None, temperature: float
    ) -> Tensor:
        """Return the tensors of the model's `score`, stacked: [num_scores, batch, time], on CPU."""
        if loss_mask is None:
            loss_mask = torch.ones_like(tokens, dtype=torch.bool)
        unused = torch.zeros(tokens.shape)
        result = torch.zeros(num_scores, *tokens.shape, device=device.device())

        def keep(micro: _MicroBatch, *scores: Tensor) -> None:
            if self._is_reporting_rank:
                # Add, do not assign: the index of a filler row belongs to a real row elsewhere.
                for all_rows, micro_rows in zip(result, scores, strict=True):
                    time = micro_rows.shape[1]
                    all_rows[:, :time].index_add_(0, micro.index.to(result.device), micro_rows)

        micro_batches = self._micro_batches(
            TrainBatch(tokens, loss_mask, unused, unused, unused), loss_weights=unused
        )
        with torch.no_grad(), megatron_runtime():
            self._run(micro_batches, keep, temperature, forward_only=True)
        dist.all_reduce(result)  # one rank filled each row, so the sum is exact
        result = result.cpu()
        if not result.isfinite().all():  # on every rank
            self._refuse("a score is not finite", self._weights())
        return result

    def _weights(self) -> Iterator[_Suspect]:
        for _, rule, layer, parameter in self._parameters():
            names = ", ".join(rule.hugging_face_names(layer))
            yield _Suspect((0,), f"the weight {names}", parameter)

    def _losses_and_gradients(self, sums: dict[str, Tensor]) -> Iterator[_Suspect]:
        """Yield this rank's loss, then its gradients, from the output back to the input."""
        if "loss" in sums:  # on the last pipeline stage
            yield _Suspect((0,), "the loss", sums["loss"])
        last_first = reversed(list(self._parameters()))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for place, (_, rule, layer, parameter) in enumerate(last_first):
            names = ", ".join(rule.hugging_face_names(layer))
            suspect = f"the gradient of {names}"
            yield _Suspect((1, -stage, place), suspect, parameter.main_grad)  # type: ignore[attr-defined]

    def _refuse(self, problem: str, suspects: Iterable[_Suspect]) -> NoReturn:
        """Raise `NonFinite` on every rank: `problem`, and where it comes from.

        Collective. Of all ranks' suspects that are not finite, the one of the first order is named.
        """
        own = next((s for s in suspects if not s.tensor.isfinite().all()), None)
        found: list[tuple[tuple[int, ...], int, str] | None] = [None] * dist.get_world_size()
        rank = dist.get_rank()
        dist.all_gather_object(found, own and (own.order, rank, own.name))
        where = "though every tensor is finite"
        if any(found):
            _, rank, name = min(entry for entry in found if entry)
            where = f"on learner rank {rank} {name} holds NaN or infinity"
        raise NonFinite(f"{problem}: {where}; resume from a checkpoint")

    @property
    def _is_reporting_rank(self) -> bool:
        """True on the one rank of each data-parallel replica whose results are used."""
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    @property
    def _last_chunk(self) -> Policy:
        """The chunk whose output is scored, on the last pipeline stage."""
        return self.chunks[-1].module

    def _sum_over_replicas(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Add up the named sums of all data-parallel replicas, on every rank."""
        own = {}
        if self._is_reporting_rank:
            own = {name: float(value) for name, value in sums.items()}
        by_rank: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)
        names = dict.fromkeys(name for rank in by_rank for name in rank)
        return {name: sum(rank.get(name, 0.0) for rank in by_rank) for name in names}

    def _micro_batches(self, batch: TrainBatch, loss_weights: Tensor) -> list[_MicroBatch]:
        """Cut this data-parallel rank's rows into micro batches, each as long as its longest row.

        Rows are sorted by length and dealt out in turn: ranks get equal shares, and the rows of a
        micro batch have similar lengths.
        """
        mask = batch.loss_mask.clone()
        mask[:, 0] = False  # nothing precedes the first token
        times = (mask * torch.arange(mask.shape[1])).amax(1) + 1
        ranks = parallel_state.get_data_parallel_world_size()
        index = times.argsort(stable=True)[parallel_state.get_data_parallel_rank() :: ranks]
        # Filler rows are masked out. A rank without rows needs one to take part in the collectives.
        # Megatron's interleaved schedule needs whole groups of micro batches of one shape.
        unit = 1
        if self._interleaved:
            unit = self._micro_batch_size * parallel_state.get_pipeline_model_parallel_world_size()
        num_filler = max(unit, -(-len(index) // unit) * unit) - len(index)
        is_real = torch.arange(len(index) + num_filler) < len(index)
        index = torch.cat([index, index.new_zeros(num_filler)])
        times = times[index] * is_real
        micro_batches = []
        for start in range(0, len(index), self._micro_batch_size):
            rows = slice(start, start + self._micro_batch_size)
            time = max(2, int(times.max() if self._interleaved else times[rows].max()))

            def cut(tensor: Tensor) -> Tensor:
                values = tensor[index[rows], :time]  # noqa: B023
                is_filler = ~is_real[rows].view(-1, 1)  # noqa: B023
                return values.masked_fill(is_filler, 0).to(device.device())

            trimmed = dataclasses.replace(batch, loss_mask=mask).map(cut)
            micro_batches.append(_MicroBatch(trimmed, cut(loss_weights), index[rows]))
        return micro_batches

    def _run(
        self,
        micro_batches: list[_MicroBatch],
        consume: Callable[..., Any],
        temperature: float,
        *,
        forward_only: bool,
    ) -> None:
        """Run Megatron's schedule over the micro batches.

        On the last pipeline stage, `consume` receives each micro batch and its scores [rows, time].
        Its result is what the schedule expects from a loss function.
        """

        def forward_step(
            remaining: Iterator[_MicroBatch], model: DistributedDataParallel
        ) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(remaining)
            hidden = model(
                input_ids=micro.rows.tokens[:, :-1], position_ids=None, attention_mask=None
            )

            def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
                return consume(micro, *self._last_chunk.score(hidden, micro.rows, temperature))

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
