"""From a learner's shards to the tensors that servers load.

Each tensor-parallel rank has a shard of a weight in Megatron's layout. A weight takes these steps:

1. The shard is split into this rank's parts of the weights that Hugging Face names.
2. The absmax of each block of one scale is taken. If a block lies on several ranks (as a row of a
   row-parallel layer does), they share the largest.
3. The part is quantized. Codes and scales go into this rank's part of a bucket.
4. Its checksum and its drift are measured, and whether it holds NaN or infinity.
5. The first rank gathers all ranks' parts and sends the full bucket. For a delta (`delta.py`), each
   rank compares its part with the one it sent last, and only the changes are gathered. With
   `direct.py`, each rank writes its part into servers' parameters; to a machine without a holder
   of the part it goes through a rank there.

Invariants, each with a test:
- Quantize before gather. Only codes, scales and unquantized tensors cross ranks, never a linear
  layer in full precision.
- The codes do not depend on the layout: byte for byte, they equal the codes of the full tensor. So
  a delta turns the tensors of the last pass into the tensors of this one.
- A bucket holds at most `bucket_bytes`, or a single larger weight with its scales. A delta's has
  headers beside these: a name and eight numbers, as text, for each part that changed.
- Beside the model, a rank holds at most two buckets and one tensor, or two with smoothing. While it
  converts, these are the bucket on its way and its own part of the next. While it gathers, they are
  the full bucket and the parts of all ranks. A bucket is released before the next is gathered.
- A converter that sends deltas also keeps this rank's parts of all buckets.
- Checksums are computed from the shards, before anything is sent.
- Constants are what the learner does not train, such as the base of adapters. They are sent only to
  servers that lack them. Their checksums are those of the last pass that sent them.
- A GPU is waited for once in a pass of a team: what is measured stays on it until the end
  (`conversion.py`). A delta also waits for each tensor that it compares, to count what changed.
- Every sender (`gather.py`), such as the first tensor-parallel rank of each pipeline stage, sends
  the buckets that it gathered itself.

Example, on every learner rank:

    converter = Converter(learner, "int8", bucket_bytes=512 * 2**20, sends_deltas=True)
    conversion = converter.convert(send)  # each sender calls send(bucket) for each of its buckets
    conversion.checksums                  # the servers' must equal these; complete on global rank 0
    converter.convert(send, since=1)      # only changes since the last pass, which sent version 1
    Writer(converter, parameters).write()  # or write into the parameters of servers (`in_place.py`)
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import EXPERT_ROWS, MEASURED_ROWS, WeightFormat
from qurl_megatron.device import device
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.weight_map import Rule, TensorPart
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import Part, as_integers, checksum_tensor
from qurl_megatron.quantization.rounding import write_rounded
from qurl_megatron.weight_sync.bucket import (
    Bucket,
    Manifest,
    PlannedBucket,
    SentWeight,
    blocks_are_shared,
    copy_values,
    scale_index,
    scale_shape,
)
from qurl_megatron.weight_sync.conversion import Conversion, DriftMeter, Measures
from qurl_megatron.weight_sync.gather import Gatherer, Send, Sink, Team, to_rank_zero

if TYPE_CHECKING:
    from qurl_megatron.quantization.smoothing import Smoothing


class Converter:
    """Converts a learner's weights to buckets, any number of times, in one format."""

    def __init__(
        self,
        learner: Learner,
        weight_format: WeightFormat | Literal["masters"],
        bucket_bytes: int,
        *,
        sends_deltas: bool = False,
        keep: Sequence[str] = (),
    ) -> None:
        """Store the settings; allocate nothing.

        Args:
            weight_format: a server's format, or "masters" for the optimizer's float32 values of
                what is trained.
            bucket_bytes: largest bucket; a single weight larger than that gets its own.
            sends_deltas: keep what a pass sends, so that the next can be a delta.
            keep: the run's `quantization.keep`.
        """
        self._learner = learner
        self.weight_format = weight_format
        self._bucket_bytes = bucket_bytes
        num_experts = learner.architecture.num_experts
        # All experts together have as many measured rows as one weight, if that leaves each enough.
        self._meters = {
            False: DriftMeter(),
            True: DriftMeter(max(EXPERT_ROWS, MEASURED_ROWS // max(1, num_experts))),
        }
        self._is_exact = weight_format == "masters"
        self._is_quantizing = not self._is_exact and weight_format != "bf16"
        self._source = learner.source(weight_format)
        self._constants: dict[bool, Conversion] = {}  # their measures, by `Team.of_experts`
        # By `Team.of_experts`: the buckets, and this rank's part of each in the last pass. None: no
        # pass sends a delta.
        self._plans: dict[bool, list[PlannedBucket]] = {}
        kept: dict[bool, list[Bucket]] = {False: [], True: []}
        self._kept = kept if sends_deltas else None
        layers = kept_layers(keep, learner.architecture)
        self._unquantized = {f"{layer}.weight" for layer in layers}

    @cached_property
    def teams(self) -> list[Team]:
        """The teams of this rank; no tensor belongs to two of them."""
        teams = [Team.tensor_parallel()]
        if self._learner.architecture.num_experts:
            teams.append(Team.expert_tensor_parallel())
        return teams

    @cached_property
    def senders(self) -> list[int]:
        """The global ranks that send, in order. Collective at the first call."""
        flags: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(flags, any(team.sends for team in self.teams))
        return [rank for rank, sends in enumerate(flags) if sends]

    @property
    def sends_deltas(self) -> bool:
        """True if what is sent to servers that hold the last pass is a delta."""
        return self._kept is not None

    @property
    def sends_changes(self) -> bool:
        """True if a server that holds the last pass needs less than a key frame."""
        return self.sends_deltas or self._source.constants is not None

    def give_up_deltas(self) -> None:
        """Keep nothing more, and send no more deltas."""
        self._kept = None

    def manifests(self, *, changing: bool = False) -> list[list[Manifest]]:
        """Return the manifests of the buckets that this rank sends in a key frame, by team.

        With `changing`, those of constants are left out.
        """
        return [
            [each.manifest() for each in self.plan(team, changing)] if team.sends else []
            for team in self.teams
        ]

    def convert(
        self, send: Send, *, since: int | None = None, is_relative: bool = False
    ) -> Conversion:
        """Convert the current weights, and return their checksums and drift.

        Collective: every learner rank calls it. Each sender calls `send` with one bucket after
        another. Only global rank 0's result is complete; another rank's covers its own tensors or
        less. If a quantized weight holds NaN or infinity, `non_finite` of the result says so.

        Args:
            since: the version of the last pass. No constants are sent, and a converter that sends
                deltas sends only what changed, in buckets of `delta.py`; the last of them is empty.
                None: all is sent.
            is_relative: send by how much the bits of an element moved, not its new value.
        """
        kept = self._kept or {}
        gatherer: Callable[..., Gatherer] = Gatherer
        if kept and since is not None:
            from qurl_megatron.weight_sync import delta_gather

            gatherer = partial(
                delta_gather.DeltaGatherer,
                since=since,
                bucket_bytes=self._bucket_bytes,
                is_relative=is_relative,
            )
        conversions = []
        for team in self.teams:
            sink = gatherer(send, team, kept.get(team.of_experts))
            conversions.append(self.convert_team(team, sink, changing=since is not None))
        if kept and since is not None and any(team.sends for team in self.teams):
            delta_gather.end_delta(send, since)
        return self.complete(conversions)

    def is_quantized(self, rule: Rule, layer: int | None) -> bool:
        """Return whether these weights are sent as codes."""
        if not (self._is_quantizing and rule.quantized):
            return False
        return self._unquantized.isdisjoint(rule.hugging_face_names(layer))

    def values(self, rule: Rule, layer: int | None, shard: Tensor) -> Tensor:
        """Return the values that servers hold of an unquantized shard, in its shape and dtype.

        Without smoothing, which changes none of them before they are rounded or after.
        """
        if shard.dtype == torch.bfloat16:
            return shard
        values = []
        for part in self._split(rule, layer, shard):
            held = part.tensor
            sent = held.new_empty(held.shape, dtype=weight_map.sent_dtype(part.name))
            write_rounded(sent, held, part.name, self._learner.rounding, part.offset)
            values.append(sent.to(shard.dtype))
        return self._merge(rule, values)

    def codes(self, rule: Rule, layer: int | None, shard: Tensor) -> quantize.CodedWeight:
        """Return the codes that servers hold of a quantized shard, in its layout.

        Smoothing of the rows is taken back in the scales, which rounds nothing. Collective over the
        ranks of a team.
        """
        whole = self._split(rule, layer, shard)  # with key-value heads that another rank has
        shared = self._share_absmax(whole, self.teams[rule.of_experts])
        parts = [part for part in whole if part.view.numel()]
        codes, scales, columns = [], [], None
        for part in parts:
            absmax, _ = shared.get(part.name, (None, None))
            quantized = quantize.quantize(
                self._smoothed(part),
                self.weight_format,
                absmax,
                offset=part.offset,
                refuses=False,
            )
            codes.append(as_integers(quantized.codes))  # not every backend joins float8
            scale = quantize.row_scale(quantized)
            if self._smoothing:
                columns, rows = self._smoothing.of_part(part.name, part.shape, part.offset)
                scale = scale if rows is None else scale / rows[:, None].to(scale.dtype)
            scales.append(scale)
        return quantize.CodedWeight(
            self._merge(rule, codes).view(quantize.code_dtype(self.weight_format)),
            self._merge(rule, scales),
            self.weight_format,
            first_column=parts[0].offset[1],
            smoothing=columns,  # all parts read the same input
        )

    @property
    def _smoothing(self) -> Smoothing | None:
        return self._learner.smoothing if self._is_quantizing else None

    def _smoothed(self, part: TensorPart) -> Tensor:
        """Return the values of a part from which its codes or its BF16 numbers are made."""
        values, smoothing = part.tensor, self._smoothing
        return smoothing.apply(part.name, values, part.offset) if smoothing else values

    def _split(self, rule: Rule, layer: int | None, shard: Tensor) -> list[TensorPart]:
        team = self.teams[rule.of_experts]
        architecture = self._learner.architecture
        return weight_map.split(rule, shard, architecture, layer, team.rank, team.size)

    def _merge(self, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
        size = self.teams[rule.of_experts].size
        return weight_map.merge(rule, parts, self._learner.architecture, size)

    @cached_property
    def machines(self) -> list[str]:
        """The hostname of each learner rank's machine. Collective at the first call."""
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
        return names

    def convert_team(
        self,
        team: Team,
        sink: Sink,
        converting: Collection[int] = (),
        *,
        changing: bool,
    ) -> Conversion:
        """Convert this rank's parts of a team's tensors, and return their measures.

        Teams of the first replica convert, and every team with one of the ranks `converting`: the
        collectives within a team need all of its ranks.
        """
        if not (team.converts or team.ranks & set(converting)):
            sink.finish()
            if self._is_exact:
                for _ in self._source.shards(of_experts=team.of_experts):
                    pass  # the first replica gathers this rank's part
            return Conversion()
        meter = self._meters[team.of_experts]
        measures = Measures(meter, self.weight_format)
        of_constants = Measures(DriftMeter(), self.weight_format)
        for planned in self.plan(team, changing):
            own = Bucket.empty(planned.manifest_on(team.rank), device())
            into = of_constants if planned.is_constant else measures
            self._convert_bucket(planned, own, team, into)
            sink.add(planned, own)
            del own  # before the next is allocated
        sink.finish()
        if self._source.constants and not changing:
            self._constants[team.of_experts] = of_constants.finish(team)
        constants = self._constants.get(team.of_experts, Conversion())
        return Conversion.merged([constants, measures.finish(team)])

    def complete(self, conversions: list[Conversion]) -> Conversion:
        """Return the measures of all teams, on rank 0 those of all senders. Collective."""
        own = Conversion.merged(conversions)
        return Conversion.merged(to_rank_zero(own, self.senders) or [own])

    def plan(self, team: Team, changing: bool) -> Iterable[PlannedBucket]:
        """Return the buckets of a team; planned once, unless each pass makes the weights anew."""
        if not self._source.is_lasting:
            return self._plan_buckets(team)
        if team.of_experts not in self._plans:
            self._plans[team.of_experts] = list(self._plan_buckets(team))
        plan = self._plans[team.of_experts]
        return [each for each in plan if not each.is_constant] if changing else plan

    def _plan_buckets(self, team: Team) -> Iterator[PlannedBucket]:
        bucket: list[SentWeight] = []
        num_bytes = 0
        for weight in self._weights(team):
            is_full = num_bytes + weight.num_bytes > self._bucket_bytes
            if bucket and (is_full or bucket[0].is_constant != weight.is_constant):
                yield PlannedBucket(bucket)
                bucket, num_bytes = [], 0
            bucket.append(weight)
            num_bytes += weight.num_bytes
        if bucket:
            yield PlannedBucket(bucket)

    def _weights(self, team: Team) -> Iterator[SentWeight]:
        """Yield the weights that a team sends, constants first."""
        source = self._source
        if source.constants:
            for constant in source.constants(of_experts=team.of_experts):
                yield from self._describe(*constant, is_constant=True)
        for rule, layer, shard in source.shards(of_experts=team.of_experts):
            yield from self._describe(rule, layer, shard)

    def _describe(
        self,
        rule: Rule,
        layer: int | None,
        shard: Tensor,
        scales: Tensor | None = None,
        *,
        is_constant: bool = False,
    ) -> Iterator[SentWeight]:
        """Yield the weights that a shard has parts of; with `scales` it has their codes."""
        is_quantized = self.is_quantized(rule, layer)
        drifts = (is_quantized or rule.is_adapter) and not is_constant
        parts = self._split(rule, layer, shard)
        held: list[Tensor | None] = [None] * len(parts)
        if scales is not None:
            held = [part.tensor for part in self._split(rule, layer, scales)]
        for part, of_codes in zip(parts, held, strict=True):
            if is_quantized:
                sent = SentWeight.quantized(part, self.weight_format)
            else:
                dtype = torch.float32 if self._is_exact else weight_map.sent_dtype(part.name)
                sent = SentWeight.plain(part, dtype)
            yield replace(sent, is_constant=is_constant, drifts=drifts, scales=of_codes)

    def _convert_bucket(
        self, planned: PlannedBucket, own: Bucket, team: Team, measures: Measures
    ) -> None:
        """Write this rank's part of a bucket into `own`, and measure it."""
        measures.begin(planned)
        views = dict(own.tensors())
        parts = [each.part for each in planned.weights if each.is_quantized and each.scales is None]
        shared = self._share_absmax(parts, team, measures.add_absmax)
        summed = set()
        for weight in planned.weights:
            name = weight.part.name
            if weight.scales is not None:
                coded = weight.part.tensor, weight.scales
                for tensor, values in zip(weight.tensors, coded, strict=True):
                    if views[tensor.name].numel():
                        copy_values(views[tensor.name], values)
            elif weight.is_quantized:
                if self._quantize(weight, views, shared.get(name), measures):
                    summed.add(name)
            elif views[name].numel():
                part, view = self._smoothed(weight.part), views[name]
                write_rounded(view, part, name, self._learner.rounding, weight.part.offset)
                if weight.drifts:
                    measures.meter.measure(name, part, view)
        rest = [tensor for tensor in planned.tensors if tensor.name not in summed]
        held = [Part(views[tensor.name], *tensor.offset_on(team.rank)) for tensor in rest]
        if held:
            measures.add_sums([tensor.name for tensor in rest], checksum_tensor(held))
        measures.meter.add_up()

    def _quantize(
        self,
        weight: SentWeight,
        views: dict[str, Tensor],
        shared: tuple[Tensor, Tensor] | None,
        measures: Measures,
    ) -> bool:
        """Write this rank's codes and scales of a weight, and measure them.

        Return whether quantizing also took the codes' checksum.

        Args:
            views: the tensors to write, by name.
            shared: if blocks of the weight lie on several ranks, the absmax of the blocks
                in this rank's part, and the scales of all blocks.
        """
        absmax, scale = shared or (None, None)
        codes_view, scale_view = (views[tensor.name] for tensor in weight.tensors)
        part = weight.part
        values, checksum = self._smoothed(part), None
        if values.numel():
            quantized = quantize.quantize(
                values,
                self.weight_format,
                absmax,
                offset=part.offset,
                out=codes_view,
                with_checksum=quantize.takes_checksum(values),
                refuses=False,  # `Measures.finish` does, with no wait for the GPU here
            )
            if absmax is None:
                assert quantized.absmax is not None
                measures.add_absmax(part, quantized.absmax)
            checksum = quantized.checksum
            if checksum is not None:
                measures.add_sums([part.name], checksum.view(1))
            measures.meter.measure(part.name, values, quantized)
            scale = quantized.scale if scale is None else scale
        if scale_view.numel():
            assert scale is not None
            scale_view.copy_(scale)
        return checksum is not None

    def _share_absmax(
        self,
        parts: Iterable[TensorPart],
        team: Team,
        note: Callable[[TensorPart, Tensor], None] | None = None,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Max-reduce the absmax of blocks that lie on several ranks, in one collective.

        Return, by name of a weight with such blocks, the absmax of the blocks in this rank's part
        and the scales of all. `note` gets the absmax of each part before that.
        """
        weight_format = self.weight_format
        divided = [part for part in parts if blocks_are_shared(part, weight_format)]
        if not divided:  # on all ranks of the team, since the list depends on the layout alone
            return {}
        grids = [torch.zeros(scale_shape(part, weight_format), device=device()) for part in divided]
        for part, grid in zip(divided, grids, strict=True):
            if part.view.numel():
                values = self._smoothed(part)
                own = quantize.block_absmax(values, weight_format, part.offset, refuses=False)
                if note:
                    note(part, own)
                grid[scale_index(part, weight_format)] = own
        flat = torch.cat([grid.view(-1) for grid in grids])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=team.group)
        sizes = [grid.numel() for grid in grids]
        shared = {}
        for part, reduced in zip(divided, flat.split(sizes), strict=True):
            grid = reduced.view(scale_shape(part, weight_format))
            scale = quantize.block_scale(grid, weight_format, part.view.dtype)
            shared[part.name] = grid[scale_index(part, weight_format)], scale
        return shared
