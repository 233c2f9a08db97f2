"""Play one rank of a learner: build, score, update and publish on fake tensors, and measure it.

The fake GPU must be installed. Sequences have their maximum length, and there are as many as fill
the pipeline. Two updates are played, and the second is measured, because the first has no moments
of Adam yet. All other ranks exist only as the sizes of process groups.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import socket
import traceback
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import minibatches
from qurl_megatron.config.schema import Config, OptimizerConfig
from qurl_megatron.device import extend_environment
from qurl_megatron.extensions.rehearsal import fake_gpu
from qurl_megatron.extensions.rehearsal.rehearsal import Rehearsal
from qurl_megatron.extensions.rehearsal.trace import Trace
from qurl_megatron.learner import learner as learner_module
from qurl_megatron.learner import shares
from qurl_megatron.learner.learner import Learner
from qurl_megatron.loop.assemble import make_critic, make_learner, make_loss
from qurl_megatron.loop.train import score_before_updates
from qurl_megatron.memory.estimate import num_micro_batches
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.client import LARGEST_MASK
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.direct import ServerParameters
from qurl_megatron.weight_sync.in_place import Writer
from qurl_megatron.weight_sync.reshard import Converter


def play(rehearsal: Rehearsal, rank: int) -> dict[str, Any]:
    """Play a rank; return its phases and the error that ended it, as fields of a `Played`."""
    trace, error = Trace(rehearsal.node), None
    extend_environment({"RANK": str(rank), "LOCAL_RANK": "0"})
    try:
        fake_gpu.check()  # not before the fork: autograd's threads would not survive it
        with trace:
            _play(rehearsal, rank, trace)
    except Exception as problem:
        error = _one_line(problem)
    phases = {name: vars(phase) for name, phase in trace.phases.items()}
    return {"rank": rank, "phases": phases, "error": error}


def _one_line(problem: Exception) -> str:
    """Return what went wrong and where, in one line."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [f for f in frames if "qurl_megatron/" in f.filename and "/rehearsal/" not in f.filename]
    last = (own or list(frames))[-1]
    place = f"{last.filename.rpartition('qurl_megatron/')[2]}:{last.lineno}"
    return f"{place}: {type(problem).__name__}: {str(problem).strip().splitlines()[0]}"


def _play(rehearsal: Rehearsal, rank: int, trace: Trace) -> None:
    config, architecture = rehearsal.config, rehearsal.architecture
    config = dataclasses.replace(
        config,
        optimizer=_few_minibatches(config.optimizer),
        critic=dataclasses.replace(
            config.critic, optimizer=_few_minibatches(config.critic.optimizer)
        ),
    )
    size = config.learner.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    _replace_the_outside(architecture, trace, rehearsal.changed_part)
    learner = make_learner(config)
    _label_groups(trace)
    critic = make_critic(config)
    if critic:  # arithmetic on the host, token by token; the batch has values of its own
        critic._estimate = lambda *_: 0.0  # type: ignore[attr-defined]
    loss = make_loss(config)
    converter = Converter(
        learner,
        config.quantization.weight_format,
        config.quantization.bucket_bytes,
        sends_deltas=config.quantization.publish != "full",
        keep=config.quantization.keep,
    )
    forward = config.learner.quantized_forward
    as_trained = partial(learner.as_served, converter, config.rollout.server, forward)
    writer = Writer(converter, _OwnParameters(trace))

    def publish(since: int | None) -> None:
        if config.quantization.transport == "direct":
            writer.write()
        else:
            converter.convert(_send, since=since)

    trace.start("first publish")
    publish(None)
    trace.start("first update")
    for number in (1, _micro_batches(config)):
        batch = _batch(config, architecture, number)
        if critic:
            trace.start("critic" if number > 1 else "first critic")
            critic.step(batch)
        parts = [learner.share(each) for each in minibatches(config, batch)]
        trace.start("score")
        with as_trained():
            score_before_updates(config, learner, parts)
            for part in parts:
                trace.start("update")
                learner.update(part, loss, temperature=config.rollout.temperature)
        del parts, part  # else the memory of a publish would include the batch
    trace.start("publish")
    publish(None)
    if config.quantization.publish != "full":
        trace.start("delta")
        publish(1)
    trace.start("end")


def _few_minibatches(optimizer: OptimizerConfig) -> OptimizerConfig:
    number = min(2, optimizer.minibatches_per_step)
    return dataclasses.replace(optimizer, minibatches_per_step=number)


def _micro_batches(config: Config) -> int:
    """Return how many micro batches fill the pipeline, at most those of a minibatch."""
    learner = config.learner
    stages, virtual = learner.pipeline_parallel_size, learner.virtual_pipeline_parallel_size
    number = 2 * stages if virtual > 1 else max(stages, 2)
    return min(number, num_micro_batches(config, config.rollout.max_length))


def _batch(config: Config, architecture: Architecture, micro_batches: int) -> TrainBatch:
    """Return a step's batch as the loop packs it, of sequences of the maximum length.

    No two share a prompt, which would take less memory.
    """
    rollout, learner = config.rollout, config.learner
    of_micro_batch = learner.micro_batch_size
    if learner.tokens_per_micro_batch:
        of_micro_batch = max(1, learner.tokens_per_micro_batch // rollout.max_length)
    number = micro_batches * of_micro_batch * learner.data_parallel_size
    number *= math.lcm(*(of.optimizer.minibatches_per_step for of in (config, config.critic)))
    lengths = torch.full((number,), rollout.max_length)
    mask = torch.arange(rollout.max_length).repeat(number) >= rollout.max_prompt_length
    total = len(mask)
    routed = None
    if architecture.num_experts and rollout.routing != "ignore":
        shape = (total, architecture.num_layers, architecture.experts_per_token)
        # Equally many tokens for every expert, which an engine's routers reach at best.
        routed = torch.arange(total * shape[2]).view(total, 1, shape[2]) % architecture.num_experts
        routed = routed.to(torch.int16).repeat(1, shape[1], 1)
    sizes = LARGEST_MASK * mask.int() if rollout.top_p < 1 else None
    zeros = torch.zeros(total)
    return TrainBatch(
        lengths,
        (torch.arange(number) % architecture.vocab_size).int().repeat_interleave(lengths),
        mask,
        behaviour_logprobs=zeros,
        rewards=zeros,
        advantages=zeros + 1,
        values=zeros,
        returns=zeros,
        token_staleness=torch.zeros(total, dtype=torch.int32),
        routed_experts=routed,
        mask_sizes=sizes,
        mask_ids=None if sizes is None else torch.zeros(int(sizes.sum()), dtype=torch.int32),
    )


def _send(bucket: Bucket) -> Any:
    """Keep a bucket until it is released, like one on its way to the servers."""
    return [bucket].clear


class _OwnParameters(ServerParameters):
    """A server that holds exactly the parts of this rank, in memory of its own."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self.machines = frozenset([socket.gethostname()])

    def write(self, change: delta.Change) -> None:
        held = self._trace.fake_like(change.values.view(change.shape))
        change.write_to(held, *change.offset)


class _NoWeights:
    """Stands for a Hugging Face directory: it knows the shapes of tensors, and no values."""

    def __init__(self, trace: Trace, architecture: Architecture) -> None:
        self._trace = trace
        self._shapes = {
            name: weight_map.full_shape(tensor, architecture)
            for rule in weight_map.rules(architecture)
            for layer in rule.layers(architecture.linear_layers)
            for tensor, name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True)
        }

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return what `Weights.read` returns, without values."""
        shape = self._shapes[name]
        sizes = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=False)]
        return self._trace.fake_on_host([*sizes, *shape[len(sizes) :]], torch.bfloat16)


def _replace_the_outside(architecture: Architecture, trace: Trace, changed_part: float) -> None:
    """Replace the model's files, other ranks' answers, and what depends on values of weights."""

    def to_replicas(parts: Iterable[Any]) -> Any:
        return next(itertools.islice(parts, parallel_state.get_data_parallel_rank(), None))

    deal, total, sums = shares.deal, Learner._total, checksum._weighted_sums

    # Only rank 0 plans micro batches; here each rank does, and takes its own replica's share.
    def deal_as_rank_zero(*arguments: Any) -> shares.Share:
        with mock.patch.object(shares, "dist", SimpleNamespace(get_rank=lambda: 0)):
            return deal(*arguments)

    def total_of_all(self: Learner, measured: list[dict[str, Tensor]]) -> dict[str, float]:
        return {"loss": 0.0, "clipped": 0.0, "tokens": 1.0, **total(self, measured)}

    def changed(old: Tensor, new: Tensor) -> Tensor:
        trace.note_wait("nonzero", new)
        trace.note_wait("mask as an index", new)
        trace.note_kernel("compare", (old, new))
        step = max(1, round(1 / changed_part))
        return torch.arange(step // 2, len(new), step, device=new.device)

    def sums_on_gpu(values: Tensor, row: int, column: int) -> Tensor:
        on_host = values.device.type == "cpu"  # without values, and in thousands of chunks
        return torch.zeros(len(values)).long() if on_host else sums(values, row, column)

    Architecture.from_directory = lambda _: architecture  # type: ignore[method-assign, assignment]
    learner_module.Weights = lambda _, architecture: _NoWeights(trace, architecture)  # type: ignore[assignment, misc, return-value]
    learner_module.deal = deal_as_rank_zero  # type: ignore[assignment]
    shares._to_replicas = to_replicas
    Learner._total = total_of_all  # type: ignore[method-assign]
    delta._changed = changed
    checksum._weighted_sums = sums_on_gpu


def _label_groups(trace: Trace) -> None:
    """Name the groups of this rank; a group that is the same as another keeps the last name."""
    getters = {
        "CP": parallel_state.get_context_parallel_group,
        "EP": parallel_state.get_expert_model_parallel_group,
        "expert TP": parallel_state.get_expert_tensor_parallel_group,
        "expert TP x EP": parallel_state.get_expert_tensor_and_model_parallel_group,
        "expert DP": parallel_state.get_expert_data_parallel_group,
        "DP x CP": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
        "DP": parallel_state.get_data_parallel_group,
        "PP": parallel_state.get_pipeline_model_parallel_group,
        "replica": parallel_state.get_model_parallel_group,
        "optimizer": parallel_state.get_intra_distributed_optimizer_instance_group,
        "TP": parallel_state.get_tensor_model_parallel_group,
    }
    for label, getter in getters.items():
        trace.labels[getter().group_name] = label
    assert dist.group.WORLD is not None
    trace.labels[dist.group.WORLD.group_name] = "all ranks"
