"""The learner: a full-precision Megatron-core policy that scores tokens and takes optimizer steps.

Every rank makes the same calls. Its place in tensor, pipeline and data parallelism decides what it
computes, and which `Share` of a minibatch it has. Invariants:

- `update` returns the same on every rank, and a `NonFinite` is raised on all ranks alike.
- `update` follows the gradient of the loss summed over all tokens, whatever the number of micro
  batches and data-parallel ranks. Nothing else averages or rescales it.
- Master weights are float32: the checkpoint's values after `transform`, never rounded. The forward
  pass uses them rounded to the compute dtype; to BF16 by `optimizer.rounding`, so that every layout
  rounds alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import add_up
from qurl_megatron.config.schema import (
    LearnerConfig,
    OptimizerConfig,
    QuantizedForward,
    Rounding,
    ServerConfig,
    WeightFormat,
)
from qurl_megatron.config.validate import check_layout
from qurl_megatron.learner.cpu_runtime import bfloat16_products, megatron_runtime
from qurl_megatron.learner.model import (
    PolicyModel,
    Routing,
    build_chunks,
    parameters_of,
    tensor_parallel_place,
    virtual_stages,
)
from qurl_megatron.learner.optimizer_shards import Dither, OptimizerShards, fuse_adam, fuse_norm
from qurl_megatron.learner.quantized_forward import Served, computing_as_served
from qurl_megatron.learner.schedule import make_scheduler
from qurl_megatron.learner.shares import MicroBatch, Share, deal
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import Weights
from qurl_megatron.model.weight_map import HuggingFaceTensor, Rule
from qurl_megatron.quantization.rounding import row_keys
from qurl_megatron.quantization.uaq import Transform

if TYPE_CHECKING:  # most runs use neither
    from qurl_megatron.learner.host_memory import HostMemory
    from qurl_megatron.quantization.smoothing import Largest, Smoothing

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""A loss: (current_logprobs, entropy, rows, loss_weights, sum_over_sequences) -> (loss, stats).

All tensors are [1, tokens]: the packed tokens of a micro batch. Log-probs and entropies are 0 where
the loss mask is False. The loss and the stats are sums over tokens, as `add_up` describes. A
model other than `PolicyModel` passes what its `score` returns in place of log-probs and entropies.
`sum_over_sequences` is the micro batch's, a collective: all ranks of a stage call it equally often.
"""

Suspect = tuple[tuple[int, ...], str, Tensor]
"""Order, name, and a tensor whose NaN or infinity would spoil the tensors of a higher order."""


@dataclass(frozen=True)
class Source:
    """What a converter sends of a learner, as `Learner.shards` yields it."""

    shards: Callable[..., Iterator[tuple[Rule, int | None, Tensor]]]
    is_lasting: bool = True  # the same tensors each time, with other values
    # What never changes, with the scales of what is codes already.
    constants: Callable[..., Iterator[tuple[Rule, int | None, Tensor, Tensor | None]]] | None = None


class NonFinite(device.SharedError, FloatingPointError):
    """A tensor of one rank holds NaN or infinity. The text names both, and is one line."""


@dataclass(frozen=True)
class Update:
    """The result of one optimizer step, the same on every rank."""

    loss: float  # summed over all tokens
    grad_norm: float  # before clipping
    learning_rate: float
    stats: dict[str, float]  # the loss function's statistics, over all tokens


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
        model: Callable[..., PolicyModel] = PolicyModel,
        architecture: Architecture | None = None,
        replays_routing: bool = False,
        steps: int = 0,
    ) -> None:
        """Build the model and load the Hugging Face directory `model_dir` into it.

        The default process group is created if the caller has not done so.

        Args:
            transform: maps the float32 master weights at load.
            model: the class of the model; it is called as `PolicyModel` is.
            architecture: that of the model; None: that of `model_dir`.
            replays_routing: use the experts that the engine chose, as the batch recorded them.
            steps: of the run, at whose end the learning rate may fall.

        Raises:
            ArchitectureError: the model or the layout cannot be used; one line.
        """
        stored = Architecture.from_directory(model_dir)
        check_layout(stored, learner)
        weights = Weights(model_dir, stored)
        self.architecture = architecture or stored
        torch.set_num_threads(learner.threads_per_rank)
        self._owns_world = not dist.is_initialized()
        if self._owns_world:
            device.initialize_distributed()
        if dist.get_world_size() != learner.world_size:
            raise ArchitectureError(
                f"{dist.get_world_size()} learner ranks, but tensor x pipeline x context x data "
                f"parallel sizes are {learner.tensor_parallel_size} x "
                f"{learner.pipeline_parallel_size} x {learner.context_parallel_size} x "
                f"{learner.data_parallel_size}; start {learner.world_size} ranks"
            )
        self._config = learner
        self._reference: list[Tensor] = []
        self.smoothing: Smoothing | None = None  # of what servers hold of the weights, if quantized
        self._as_served: Callable[[], AbstractContextManager[None]] = nullcontext
        with megatron_runtime():
            parallel_state.initialize_model_parallel(
                learner.tensor_parallel_size,
                learner.pipeline_parallel_size,
                virtual_pipeline_model_parallel_size=virtual_stages(learner),
                context_parallel_size=learner.context_parallel_size,
                expert_model_parallel_size=learner.expert_parallel_size,
                expert_tensor_parallel_size=learner.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
            )
            self.chunks = self._wrap(build_chunks(self.architecture, learner, model))
            self._make_optimizer(optimizer, steps)
            self._load(weights, transform)
        self._routing = Routing(self.chunks, replays_routing)

    def share(self, batch: TrainBatch) -> Share:
        """Deal a minibatch out to the data-parallel replicas; return this replica's share.

        Collective. Global rank 0 has the minibatch, the others an empty one.
        """
        return deal(batch, self._config, self.architecture)

    def score(self, share: Share, names: Sequence[str], *, temperature: float) -> None:
        """Score the tokens of `share` with the current weights, without gradients.

        The scores stay in the share, on the last pipeline stage. Position t belongs to token t
        given the tokens before it; positions outside the loss mask are 0.

        Args:
            names: the fields of the share's rows that keep what the model's `score` returns:
                natural log-probs and entropies of a policy, values of a value model.
            temperature: divides the logits.

        Raises:
            NonFinite: a score is not finite.
        """
        is_finite = torch.ones((), device=device.device())

        def keep(micro: MicroBatch, *scores: Tensor) -> None:
            for name, values in zip(names, scores, strict=False):
                setattr(micro.rows, name, values)
            is_finite.mul_(torch.stack([values.isfinite().all() for values in scores]).all())

        with torch.no_grad(), megatron_runtime():
            self._run(share.micro_batches, keep, temperature, forward_only=True)
        dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        if not is_finite:  # on every rank
            _refuse("a score is not finite", self._weights())

    def measure(
        self, share: Share, statistics: Callable[[TrainBatch], dict[str, Tensor]]
    ) -> dict[str, float]:
        """Return `statistics` of the share's rows, added up over micro batches and replicas.

        Collective.
        """
        is_last = parallel_state.is_pipeline_last_stage()
        rows = [micro.rows for micro in share.micro_batches if is_last]
        return self._total([statistics(each) for each in rows])

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

    def smooth(self, share: Share, exponent: float) -> Largest:
        """Choose `smoothing` from the inputs of `share` and the current weights. Collective.

        Return the channel that stood out most.
        """
        from qurl_megatron.learner.calibration import watching
        from qurl_megatron.quantization.smoothing import Maxima

        maxima = Maxima(self.architecture, device.device())
        chunks = [chunk.module for chunk in self.chunks]
        with watching(chunks, share.micro_batches, self.architecture, maxima):
            self.score(share, [], temperature=1.0)
        dist.all_reduce(maxima.values, op=dist.ReduceOp.MAX)
        self.smoothing = maxima.smoothing(exponent)
        return maxima.largest()

    @contextmanager
    def as_served(
        self, served: Served, server: ServerConfig, what: QuantizedForward | None = "all"
    ) -> Iterator[None]:
        """Score and update as the servers compute within this context; collective in each pass.

        Args:
            what: as in `learner.quantized_forward`; None: in full precision.
        """
        if what:
            self._as_served = partial(self._computing_as_served, served, server, what)
        try:
            yield
        finally:
            self._as_served = nullcontext

    def _computing_as_served(
        self, served: Served, server: ServerConfig, what: QuantizedForward
    ) -> AbstractContextManager[None]:
        chunks = [chunk.module for chunk in self.chunks]
        return computing_as_served(chunks, self.architecture, served, server, what)

    def update(self, share: Share, loss_function: LossFunction, *, temperature: float) -> Update:
        """Take one optimizer step on the sum of `loss_function` over a minibatch.

        Args:
            share: its rows have `loss_weights`, which are passed to `loss_function`. They include
                the normalization over the whole minibatch.
            temperature: divides the logits.

        Raises:
            NonFinite: the loss or the gradient norm is not finite; the weights are then unusable.
        """
        measured: list[dict[str, Tensor]] = []  # of each micro batch, on the last pipeline stage

        def loss(micro: MicroBatch, *scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, stats = loss_function(
                *scores, micro.rows, micro.rows.loss_weights, micro.sum_over_sequences
            )
            measured.append({"loss": total.detach(), **stats})
            return total, torch.zeros((), dtype=torch.int, device=device.device()), {}

        with megatron_runtime():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._routing.reset_counts()
            offload, storages = self._config.offload_optimizer, self._optimizer_shards.storages
            with self._host_memory.holding(storages()) if offload else nullcontext():
                self._run(share.micro_batches, loss, temperature, forward_only=False)
            # Before the update: Megatron's warmup starts at a learning rate of 0.
            self.scheduler.step(increment=1)
            self._updates += 1
            learning_rate = self.optimizer.param_groups[0]["lr"]
            _, grad_norm, _ = self.optimizer.step()
        stats = self._total(measured)
        if share.micro_batches[0].routed_experts is not None:
            stats["routing_changed"], stats["routing_known"] = self._routing.counts()
        # Both are the same on every rank, so no further exchange is needed while they are finite.
        if not (math.isfinite(grad_norm) and math.isfinite(stats["loss"])):
            losses = [each["loss"] for each in measured]
            _refuse(f"the gradient norm is {grad_norm}", self._losses_and_gradients(losses))
        return Update(stats.pop("loss"), float(grad_norm), float(learning_rate), stats)

    def update_shown(self) -> float | None:
        """Return the fraction of the masters' way since the start that their BF16 values have gone.

        Collective. It is the length of the projection of the one on the other, over a sample; None
        while the masters have not moved.
        """
        sums = torch.stack(self._optimizer_shards.shown())
        dist.all_reduce(sums)
        moved, shown = sums.tolist()
        return shown / moved if moved else None

    def source(self, weight_format: WeightFormat | Literal["masters"]) -> Source:
        """Return what servers of a format hold, or the float32 masters of what is trained."""
        if weight_format == "masters":
            return Source(self.masters, is_lasting=False)
        return Source(self.shards)

    def shards(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield this rank's shards: rule, layer number in the whole model, parameter.

        The parameters are those of the forward pass, in its dtype; do not write to them. The output
        layer of a tied model is left out, because it is the embedding.

        Args:
            of_experts: True for the shards of experts only, False for the others; None for all.
        """
        for rule, layer, parameter in self._held_parameters(of_experts):
            yield rule, layer, parameter.detach()

    def masters(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield what `shards` yields, but with the optimizer's float32 master weights.

        Collective over the ranks that hold replicas of the same shards; only the first of them gets
        values, the others empty tensors.
        """
        for rule, layer, parameter in self._held_parameters(of_experts):
            yield rule, layer, self._optimizer_shards.gather_master(parameter)

    def base_hash(self) -> str:
        """Return a hash of what is not trained, the same on any layout; empty if all is.

        Collective.
        """
        return ""

    def _held_parameters(
        self, of_experts: bool | None
    ) -> Iterator[tuple[Rule, int | None, torch.nn.Parameter]]:
        for name, rule, layer, parameter in self._parameters():
            is_copy = name == "output_layer.weight" and self.architecture.tie_word_embeddings
            if not is_copy and of_experts in (None, rule.of_experts):
                yield rule, layer, parameter

    def leave(self) -> None:
        """Move weights, masters, moments and the reference to the host's memory.

        Until `come_back` nothing can be computed, published or saved.
        """
        buffers = [
            buffer
            for chunk in self.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        weights = [buffer.param_data for buffer in buffers] + self._untrained()
        gradients = [buffer.grad_data for buffer in buffers]
        optimizer = self._optimizer_shards.storages()
        self._host_memory.take([*optimizer, *weights, *self._reference], dropped=gradients)

    @cached_property
    def _host_memory(self) -> HostMemory:
        from qurl_megatron.learner.host_memory import HostMemory

        return HostMemory()

    def _untrained(self) -> list[Tensor]:
        """Return the weights that Megatron's buffers do not hold, because they are not trained."""
        return [each.data for *_, each in self._parameters() if not each.requires_grad]

    def come_back(self) -> None:
        """Move everything back, bit for bit; gradients are 0."""
        self._host_memory.give_back()

    def sharded_state(self) -> dict[str, Any]:
        """Return weights, optimizer and schedule as a sharded state of Megatron's checkpoints.

        Tensors are not copied, and loading writes into them. Call this, and use the result, within
        `megatron_runtime()`.
        """
        model = {
            f"chunk{number}": chunk.module.sharded_state_dict()
            for number, chunk in enumerate(self.chunks)
        }
        self._optimizer_shards.prepare_state(self._updates)
        return {
            "model": model,
            "optimizer": self._optimizer_shards.sharded_state(model),
            "optimizer_steps": self._updates,
        }

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Load the `sharded_state` after a run's `step`.

        Learning rate and weight decay are those of this learner's own configuration at that step,
        whose steps may have had another number of updates before.
        """
        for number, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(state["model"][f"chunk{number}"])
        # Masters and moments were loaded in place.
        self._updates = state["optimizer_steps"]
        self._optimizer_shards.prepare_state(self._updates)
        self.scheduler.step(increment=step * self._updates_per_step)

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

    def _wrap(self, chunks: list[PolicyModel]) -> list[DistributedDataParallel]:
        # Gradients are reduced while the backward pass goes on. Weights are gathered after the
        # step: gathering them in the next forward pass gives wrong losses where the output layer is
        # read outside of a module's forward pass, as in `PolicyModel.score`.
        overlap = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap
        )
        wrapped = [
            DistributedDataParallel(chunk.config, ddp, chunk.to(device.device()))
            for chunk in chunks
        ]
        if overlap:
            config = chunks[0].config
            no_sync = [chunk.no_sync for chunk in wrapped]
            config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
            if len(wrapped) > 1:
                config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
        return wrapped

    def _make_optimizer(self, optimizer: OptimizerConfig, steps: int) -> None:
        dtype = self.chunks[0].config.params_dtype
        config = MegatronOptimizerConfig(
            lr=optimizer.learning_rate,
            min_lr=optimizer.min_learning_rate,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.epsilon,
            clip_grad=optimizer.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False)
        fuse_adam(self.optimizer)
        fuse_norm()
        self.rounding: Rounding = optimizer.rounding
        dithers = {} if self.rounding == "nearest" else dict(self._dithers())
        self._optimizer_shards = OptimizerShards(self.optimizer, dithers)
        self.scheduler = make_scheduler(self.optimizer, optimizer, steps)
        self._updates = 0  # as Adam counts them
        self._updates_per_step = optimizer.minibatches_per_step

    def _dithers(self) -> Iterator[tuple[Tensor, Dither]]:
        """Yield the parameters, and where they lie in the full tensors."""
        place = device.device()
        for _, rule, layer, parameter in self._parameters():
            tp_rank, tp_size = tensor_parallel_place(rule)
            keys, first_column = [], 0
            for part, hf_name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
                index = weight_map.part_index(rule, part, self.architecture, tp_rank, tp_size)
                rows, *columns = index
                keys.append(row_keys(hf_name, rows.start, rows.stop - rows.start, place))
                first_column = columns[0].start if columns else 0  # of all parts alike
            merged = weight_map.merge(rule, keys, self.architecture, tp_size)
            yield parameter, Dither(merged, first_column)
        for chunk in self.chunks:
            for name, parameter in chunk.module.named_parameters():
                if name in chunk.module.extra_parameters:
                    yield parameter, Dither(row_keys(name, 0, len(parameter), place), 0)

    @torch.no_grad()
    def _load(self, weights: Weights, transform: Transform | None) -> None:
        for _, rule, layer, parameter in self._parameters():
            tp_rank, tp_size = tensor_parallel_place(rule)
            parts = []
            for part, hf_name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
                index = weight_map.part_index(rule, part, self.architecture, tp_rank, tp_size)
                master = self._read(weights, part, hf_name, index)
                parts.append(transform(hf_name, master) if transform else master)
            shard = weight_map.merge(rule, parts, self.architecture, tp_size)
            self._optimizer_shards.write(parameter, shard)
        self._optimizer_shards.start_from_here()

    def _read(
        self, weights: Weights, part: HuggingFaceTensor, name: str, index: tuple[slice, ...]
    ) -> Tensor:
        """Return the first values of a tensor at `index`, in float32."""
        return weights.read(name, index).float()

    def _parameters(self) -> Iterator[tuple[str, Rule, int | None, torch.nn.Parameter]]:
        return parameters_of([chunk.module for chunk in self.chunks], self.architecture)

    # Running

    def _weights(self) -> Iterator[Suspect]:
        for _, rule, layer, parameter in self._parameters():
            names = ", ".join(rule.hugging_face_names(layer))
            yield (0,), f"the weight {names}", parameter

    def _losses_and_gradients(self, losses: list[Tensor]) -> Iterator[Suspect]:
        """Yield this rank's losses, then its gradients, from the output back to the input."""
        for loss in losses:
            yield (0,), "the loss", loss
        last_first = reversed(list(self._parameters()))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for place, (_, rule, layer, parameter) in enumerate(last_first):
            if not parameter.requires_grad:
                continue
            names = ", ".join(rule.hugging_face_names(layer))
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            yield (1, -stage, place), f"the gradient of {names}", gradient

    def _total(self, measured: list[dict[str, Tensor]]) -> dict[str, float]:
        """Add up the statistics of all micro batches of all replicas, on every rank.

        Collective. `measured` has those of this rank's micro batches, on the last pipeline stage.
        """
        own: list[dict[str, float]] = []
        # Tensor-parallel ranks have the same scores, so only the first counts; context-parallel
        # ranks have other tokens.
        if measured and parallel_state.get_tensor_model_parallel_rank() == 0:
            # An objective may measure on the host, although its scores are on a GPU.
            place = device.device()
            rows = [torch.stack([v.to(place, torch.float64) for v in m.values()]) for m in measured]
            own = [dict(zip(measured[0], row, strict=True)) for row in torch.stack(rows).tolist()]
        by_rank: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, add_up(own))
        return add_up(by_rank)

    def _run(
        self,
        micro_batches: list[MicroBatch],
        consume: Callable[..., Any],
        temperature: float,
        *,
        forward_only: bool,
    ) -> None:
        """Run Megatron's schedule over the micro batches.

        On the last pipeline stage, `consume` receives each micro batch and its scores [1, tokens].
        Its result is what the schedule expects from a loss function.
        """

        def forward_step(
            remaining: Iterator[MicroBatch], model: DistributedDataParallel
        ) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(remaining)
            self._routing.expect(model, micro.routed_experts)
            hidden = model(
                input_ids=micro.inputs,
                position_ids=None,
                attention_mask=None,
                packed_seq_params=micro.sequences,
            )

            def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
                policy = self.chunks[-1].module  # on the last pipeline stage
                return consume(micro, *policy.score(hidden, micro.rows, micro.scored, temperature))

            return hidden, finish

        is_bfloat16 = self._config.dtype == "bfloat16"
        with bfloat16_products() if is_bfloat16 else nullcontext(), self._as_served():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(micro_batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                # All tokens: the schedule divides them by context and tensor parallelism.
                seq_length=micro_batches[0].inputs.shape[1] * self._config.context_parallel_size,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )


def _refuse(problem: str, suspects: Iterator[Suspect]) -> NoReturn:
    """Raise `NonFinite` on every rank: `problem`, and where it comes from.

    Collective. Of all ranks' suspects that are not finite, the one of lowest order is named.
    """
    rank = dist.get_rank()
    own = [(order, rank, name) for order, name, tensor in suspects if not tensor.isfinite().all()]
    found: list[list[tuple[tuple[int, ...], int, str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, own[:1])
    where = "though every tensor is finite"
    if any(found):
        _, rank, name = min(itertools.chain(*found))
        where = f"on learner rank {rank} {name} holds NaN or infinity"
    raise NonFinite(f"{problem}: {where}; resume from a checkpoint")
