"""The resharding converter: a learner's shards -> quantized full tensors -> buckets.

The learner's weights are split over tensor-parallel ranks and pipeline stages, in Megatron's
layout. The servers want full tensors under Hugging Face names, quantized. One pass of the converter
gets from one to the other:

    shard --split--> parts --absmax (max-reduced over TP)--> codes, scales --gather--> bucket

Invariants, each with a test:
- Quantize before gather. Only codes, scales and unquantized tensors cross ranks, never a linear
  layer in full precision.
- The codes do not depend on the layout: they are those of quantizing the full tensor, byte for
  byte. If a block of one scale lies on several tensor-parallel ranks (as a row of a row-parallel
  layer does), its absmax is max-reduced over them first.
- A bucket holds at most `bucket_bytes`, or a single larger weight with its scales.
- Beside the model, a rank holds at most two buckets and one tensor: while it converts, the bucket
  that is on its way and the next one, of which other ranks than a sender hold their part; while it
  gathers, the full bucket and its parts. A bucket is released before the next is gathered.
- Checksums are computed from the shards, before anything is sent.
- A GPU is waited for once in a pass: what is measured stays on it until the end (`conversion.py`).
- Every sender (`gather.py`), such as the first tensor-parallel rank of each pipeline stage, sends
  what it gathered itself.

A converter that keeps codes keeps this rank's parts of all buckets, a byte for each quantized and
two for each other parameter. Its next pass can then send a delta: each rank compares its parts with
the kept ones, and only what changed (`delta.py`) is gathered. A delta holds, byte for byte, what
turns the tensors of the last pass into those of this one, for any layout.

Example, on every learner rank:

    converter = Converter(learner, "int8", bucket_bytes=512 * 2**20, keeps_codes=True)
    conversion = converter.convert(send)  # each sender calls send(bucket) for each of its buckets
    conversion.checksums                  # the servers' must be equal; complete on global rank 0
    converter.convert(send, base=1)       # what changed since the last pass, which was version 1
    converter.write(places)               # or into the parameters of servers on this machine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import EXPERT_ROWS, MEASURED_ROWS, WeightFormat
from qurl_megatron.device import device
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import Part
from qurl_megatron.weight_sync.bucket import Bucket, Description
from qurl_megatron.weight_sync.conversion import Conversion, Measures
from qurl_megatron.weight_sync.delta_buckets import Deltas, Release, Send
from qurl_megatron.weight_sync.direct import Places, write
from qurl_megatron.weight_sync.drift import DriftMeter
from qurl_megatron.weight_sync.gather import (
    Team,
    empty_full,
    empty_part,
    find_senders,
    gather,
    part_views,
    to_rank_zero,
)
from qurl_megatron.weight_sync.layout import (
    PlannedBucket,
    SentWeight,
    blocks_are_shared,
    scale_index,
    scale_shape,
)


class Converter:
    """Converts a learner's weights to buckets, any number of times, in one format."""

    def __init__(
        self,
        learner: Learner,
        weight_format: WeightFormat | Literal["masters"],
        bucket_bytes: int,
        *,
        keeps_codes: bool = False,
        keep: Sequence[str] = (),
        with_steps: bool = False,
    ) -> None:
        """Store the settings; allocate nothing.

        Args:
            weight_format: a server's format, or "masters" for the optimizer's float32 values.
            bucket_bytes: largest bucket; a single weight larger than that gets its own.
            keeps_codes: keep what a pass sends, so that the next can be a delta.
            keep: the run's `quantization.keep`.
            with_steps: deltas tell steps, so that they can be coded; a byte for each change.
        """
        self.keeps_codes = keeps_codes
        self._learner = learner
        self._format = weight_format
        self._bucket_bytes = bucket_bytes
        self._with_steps = with_steps
        num_experts = learner.architecture.num_experts
        # The rows of experts that are measured are as many as those of one weight, if possible.
        self._meters = {
            False: DriftMeter(),
            True: DriftMeter(max(EXPERT_ROWS, MEASURED_ROWS // max(1, num_experts))),
        }
        self._plans: dict[int, list[PlannedBucket]] = {}  # by number of the team
        self._kept: list[Bucket] = []  # this rank's part of each bucket in the last pass
        layers = kept_layers(keep, learner.architecture)
        self._unquantized = {f"{layer}.weight" for layer in layers}

    @cached_property
    def teams(self) -> list[Team]:
        """The teams that this rank belongs to; their tensors are different ones."""
        teams = [Team.tensor_parallel()]
        if self._learner.architecture.num_experts:
            teams.append(Team.expert_tensor_parallel())
        return teams

    @cached_property
    def senders(self) -> list[int]:
        """The global ranks that send, in order. All learner ranks must ask at the same time."""
        return find_senders(self.teams)

    def descriptions(self) -> list[Description]:
        """Return the buckets that this rank sends in every pass that is no delta, in order."""
        return [
            Description.of((tensor.name, tensor.dtype, tensor.shape) for tensor in planned.tensors)
            for number, team in enumerate(self.teams)
            if team.sends
            for planned in self._plan(number)
        ]

    def convert(
        self,
        send: Send,
        *,
        base: int | None = None,
        all_sent: Callable[[], None] = lambda: None,
    ) -> Conversion:
        """Convert the current weights, and return their checksums and drift.

        Collective: every learner rank calls it. `send` is called on each sender, with one bucket
        after another. Only global rank 0's result is complete; that of another rank covers its own
        tensors or less. If a quantized weight holds NaN or infinity, `non_finite` says so.

        Args:
            base: the version that the last pass was sent as; what changed since is sent, as buckets
                of `delta.py`. None: all is sent.
            all_sent: called after this rank's last bucket, before ranks wait for each other.
        """
        if not self.keeps_codes:
            self._kept.clear()
        numbers = iter(range(2**31))  # of buckets, over all teams

        def convert_team(team: Team, plan: Iterator[PlannedBucket], measures: Measures) -> None:
            deltas = None
            if base is not None:
                deltas = Deltas(send, base, self._bucket_bytes, team, with_steps=self._with_steps)
            # What is kept or compared is this rank's part alone. Else rank 0 makes its part in the
            # bucket that is sent, and nothing of it is copied.
            is_leader = team.rank == 0 and team.size > 1
            is_full = is_leader and base is None and not self.keeps_codes
            release: Release = None
            for planned, number in zip(plan, numbers, strict=False):  # `plan` ends first
                tensors = planned.tensors
                own = empty_full(tensors) if is_full else empty_part(tensors, team.rank)
                self._convert_bucket(
                    planned,
                    part_views(own, tensors, 0) if is_full else dict(own.tensors()),
                    team,
                    measures,
                )
                if deltas is not None:
                    deltas.add(tensors, self._kept[number], own)
                else:
                    if release:
                        release()  # before memory for the parts of other ranks is allocated
                        release = None
                    bucket = gather(tensors, own, team, is_full=is_full)
                    if bucket is not None:
                        release = send(bucket)
                    del bucket
                if self.keeps_codes:
                    self._kept[number : number + 1] = [own]
                del own  # before the next is allocated
            if deltas is not None:
                deltas.finish()
            if release:
                release()

        return self._pass(convert_team, all_sent)

    def write(self, places: Places) -> Conversion:
        """Write the current weights into servers' parameters, and return checksums and drift.

        Collective, as `convert` is. Every rank writes its own parts, and nothing is gathered.
        """

        def write_team(team: Team, plan: Iterator[PlannedBucket], measures: Measures) -> None:
            for planned in plan:
                shared = self._share_absmax(planned, team, measures)
                write(planned, places, team.rank, self._format, shared, measures)

        return self._pass(write_team)

    def _pass(
        self,
        convert_team: Callable[[Team, Iterator[PlannedBucket], Measures], None],
        all_sent: Callable[[], None] = lambda: None,
    ) -> Conversion:
        """Go through the weights of each team; return what was measured, complete on rank 0."""
        senders, own = self.senders, []
        for number, team in enumerate(self.teams):
            if not team.converts:
                if self._format == "masters":
                    # The first replica gathers this rank's part.
                    for _ in self._learner.masters(of_experts=team.of_experts):
                        pass
                continue
            measures = Measures(self._meters[team.of_experts], self._format)
            convert_team(team, measures.noting(self._plan(number)), measures)
            own.append(measures.finish(team))
        all_sent()
        conversion = Conversion.merged(own)
        return Conversion.merged(to_rank_zero(conversion, senders) or [conversion])

    def _plan(self, number: int) -> list[PlannedBucket] | Iterator[PlannedBucket]:
        """Return the buckets of a team; planned once, unless the weights are gathered for it."""
        if self._format == "masters":
            return self._plan_buckets(self.teams[number])
        if number not in self._plans:
            self._plans[number] = list(self._plan_buckets(self.teams[number]))
        return self._plans[number]

    def _plan_buckets(self, team: Team) -> Iterator[PlannedBucket]:
        bucket: list[SentWeight] = []
        num_bytes = 0
        for weight in self._weights(team):
            if bucket and num_bytes + weight.num_bytes > self._bucket_bytes:
                yield PlannedBucket(bucket)
                bucket, num_bytes = [], 0
            bucket.append(weight)
            num_bytes += weight.num_bytes
        if bucket:
            yield PlannedBucket(bucket)

    def _weights(self, team: Team) -> Iterator[SentWeight]:
        masters = self._format == "masters"
        learner = self._learner
        weights = learner.masters if masters else learner.shards
        for rule, layer, shard in weights(of_experts=team.of_experts):
            for part in weight_map.split(
                rule, shard, learner.architecture, layer, team.rank, team.size
            ):
                is_quantized = rule.quantized and part.name not in self._unquantized
                if is_quantized and self._format not in ("bf16", "masters"):
                    yield SentWeight.quantized(part, self._format)
                else:
                    yield SentWeight.plain(part, torch.float32 if masters else torch.bfloat16)

    def _convert_bucket(
        self, planned: PlannedBucket, views: dict[str, Tensor], team: Team, measures: Measures
    ) -> None:
        """Write this rank's part of a bucket into `views`, by name, and measure it."""
        shared = self._share_absmax(planned, team, measures)
        summed = set()
        for weight in planned.weights:
            name = weight.part.name
            if weight.is_quantized:
                if self._quantize(weight, views, shared.get(name), measures):
                    summed.add(name)
            elif views[name].numel():
                views[name].copy_(weight.part.tensor)
        rest = [tensor for tensor in planned.tensors if tensor.name not in summed]
        measures.add_parts(
            [tensor.name for tensor in rest],
            [Part(views[tensor.name], *tensor.offset_on(team.rank)) for tensor in rest],
        )
        measures.meter.add_up()

    def _quantize(
        self,
        weight: SentWeight,
        views: dict[str, Tensor],
        shared: tuple[Tensor, Tensor] | None,
        measures: Measures,
    ) -> bool:
        """Write this rank's codes and scales of a weight into `views`.

        Return whether the codes' checksum was measured on the way.

        `shared` has absmax (of the blocks the part touches) and scale (of all blocks) of a weight
        whose blocks lie on several ranks.
        """
        absmax, scale = shared or (None, None)
        codes_view, scale_view = (views[tensor.name] for tensor in weight.tensors)
        part = weight.part
        values, checksum = part.tensor, None
        if values.numel():
            quantized = quantize.quantize(
                values,
                self._format,
                absmax,
                offset=part.offset,
                out=codes_view,
                with_checksum=quantize.takes_checksum(values),
                refuses=False,
            )
            if absmax is None:
                assert quantized.absmax is not None
                measures.add_absmax(part, quantized.absmax)
            checksum = quantized.checksum
            if checksum is not None:
                measures.add_sum(part.name, checksum)
            measures.meter.measure(part.name, values, quantized)
            scale = quantized.scale if scale is None else scale
        if scale_view.numel():
            assert scale is not None
            scale_view.copy_(scale)
        return checksum is not None

    def _share_absmax(
        self, planned: PlannedBucket, team: Team, measures: Measures
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Max-reduce the absmax of blocks that lie on several ranks, in one collective.

        Return, for each such weight by name, the absmax of the blocks that this rank's part touches
        and the scales of all blocks.
        """
        parts: list[TensorPart] = [
            weight.part
            for weight in planned.weights
            if weight.is_quantized and blocks_are_shared(weight.part, self._format)
        ]
        if not parts:
            return {}
        grids = [torch.zeros(scale_shape(part, self._format), device=device()) for part in parts]
        for part, grid in zip(parts, grids, strict=True):
            if part.view.numel():
                own = quantize.block_absmax(part.tensor, self._format, part.offset, refuses=False)
                measures.add_absmax(part, own)
                grid[scale_index(part, self._format)] = own
        flat = torch.cat([grid.view(-1) for grid in grids])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=team.group)
        shared = {}
        for part, reduced in zip(parts, flat.split([grid.numel() for grid in grids]), strict=True):
            grid = reduced.view(scale_shape(part, self._format))
            scale = quantize.block_scale(grid, self._format, part.view.dtype)
            shared[part.name] = grid[scale_index(part, self._format)], scale
        return shared
