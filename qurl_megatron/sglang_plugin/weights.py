"""The weights that a server's layers hold: receiving them, their version, and their checksums.

A server can receive weights while requests are half sampled. Each scheduler, one process per
tensor-parallel rank, therefore keeps the version of the weights it has loaded:

- `update_weights` takes it from the request that brings a bucket. A publish pauses the server
  first, so no token is sampled between two buckets. A delta of a version that the scheduler does
  not hold is refused.
- `run_batch` stamps it on every token that a forward pass samples. SGLang carries the stamps to
  `meta_info["token_versions"]` of the answer, one per token. With the overlap schedule, SGLang
  reads the tokens of a pass after the next has begun; a stamp at that point could be too new.
- `enqueue` makes it part of the key of cached prefixes. A request that is about to be prefilled
  finds only the prefixes of requests that began under the same version.

SGLang has versions of its own (`meta_info["weight_versions"]`), which change after the tokens that
it has read so far. A pause in place leaves the last pass unread, so its tokens get the next
version. SGLang also records the version of each bucket, but reads only the last record.
`keep_newest` drops the others.

A request of the learner announces what it sends (`weight_sync/bucket.py`), and `receive` takes each
bucket by a broadcast from its sender, or from the file in which the HTTP process has put it. While
one bucket is written into the parameters, the next is received. Whole tensors and deltas are
written in place, through the map of `held_parts`; SGLang's loaders would look up each tensor anew.
Requests without this project's markers go to SGLang's own code.

`POST /weights_checker {"action": "checksum"}` returns, for each tensor-parallel rank, the checksum
of every part of a tensor that the rank holds, by `checksum.part_key`. `checksum.combine` adds them
up to the checksums of full tensors. They are computed from the fused and sharded parameters with
which the layers multiply.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqOutput,
)
from torch import Tensor

from qurl_megatron.quantization.checksum import Part, as_integers, checksums, part_key
from qurl_megatron.quantization.products import forget
from qurl_megatron.weight_sync.bucket import (
    FILE_PREFIX,
    IN_PLACE,
    Bucket,
    Manifest,
    changed_version,
    channel_name,
    is_key_frame,
    read_file,
    read_key_frame,
)

# A hung learner holds a server up for this long; PyTorch's own limit is half an hour.
LEARNER_TIMEOUT_S = 120.0

_ADAPTERS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # and the names that are sent
# SGLang's Qwen3.5 keeps the modules of full attention in the layer, without `self_attn`.
_IN_ATTENTION = re.compile(r"(?<=\d)\.(qkv_proj|o_proj|q_norm|k_norm)$")
_MERGED = {  # the projections that SGLang holds as one
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": (*(f"in_proj_qkv:{part}" for part in ("query", "key", "value")), "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}

HeldPart = tuple[str, Part]  # the name of a Hugging Face tensor, and the part that this rank holds


def update_weights(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Load weights and note their version, around SGLang's `update_weights_from_distributed`.

    Refuse a delta of a version that this scheduler does not hold.
    """
    scheduler = updater.scheduler
    since, held = changed_version(request.names), loaded_version(scheduler)
    # After the first bucket of a delta, the scheduler holds the version that the others bring too.
    if since is not None and held not in (since, int(request.weight_version)):
        if not request.group_name.startswith(FILE_PREFIX):
            # Otherwise the senders would wait until their time limit.
            leave(updater.tp_worker.model_runner.weight_updater, request.group_name)
        return UpdateWeightsFromDistributedReqOutput(
            success=False, message=f"it holds version {held}, and was sent a delta of {since}"
        )
    scheduler.device_module.synchronize()  # the last pass before a pause may still read the weights
    forget()  # copies of these weights that CPU products have made
    if request.names == [IN_PLACE]:
        success, message = updater.flush_cache_after_weight_update(request, True, "Written.")
        answer = UpdateWeightsFromDistributedReqOutput(success=success, message=message)
    else:
        # A session lasts for one request, so that none stays open if the learner dies. At a
        # session's ends SGLang restores and packs layers; this project's layers need neither.
        updater.begin_weight_update(BeginWeightUpdateReqInput(selector="target"))
        answer = original(updater, request)
        updater.end_weight_update(EndWeightUpdateReqInput())
    if answer.success:
        clear_between_adapters(updater.tp_worker.model_runner.model)
        scheduler.loaded_version = int(request.weight_version)
        for waiting in scheduler.waiting_queue:  # they begin with the new weights
            waiting.extra_key = cache_key(scheduler)
    return answer


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *options: Any, **named: Any
) -> Any:
    """Stamp the version on the tokens of a forward pass, around `Scheduler.run_batch`."""
    result = original(scheduler, batch, *options, **named)
    output = getattr(result, "logits_output", None)
    if output is not None:
        stamps = {"token_versions": [loaded_version(scheduler)] * len(batch.reqs)}
        output.customized_info = {**(output.customized_info or {}), **stamps}
    return result


def enqueue(
    original: Callable[..., None], scheduler: Any, request: Any, *options: Any, **named: Any
) -> None:
    """Limit a request to this version's prefixes, around `Scheduler._add_request_to_queue`."""
    request.extra_key = cache_key(scheduler)
    original(scheduler, request, *options, **named)


def keep_newest(original: Callable[..., None], context: Any, source: str, **fields: Any) -> None:
    """Drop records that a new one replaces, around `RuntimeContext.override`.

    SGLang would keep a record of every update's version for as long as the server runs.
    """
    original(context, source, **fields)
    log = context._overrides_log
    log[:-1] = [record for record in log[:-1] if not record[1].keys() <= fields.keys()]


def loaded_version(scheduler: Any) -> int:
    """Return the version of the weights that a scheduler has loaded; 0 before the first update."""
    return getattr(scheduler, "loaded_version", 0)


def cache_key(scheduler: Any) -> str:
    """Return the part of a prefix's cache key that separates weight versions."""
    return f"weights {loaded_version(scheduler)}"


def join_group(original: Callable[..., Any], **options: Any) -> Any:
    """Join a process group for weights, as SGLang's `original` does, but with a time limit.

    A learner that is forked from a process with this plugin also calls this, with its own limit.
    """
    return original(**{"timeout": timedelta(seconds=LEARNER_TIMEOUT_S), **options})


def receive(
    original: Callable[..., Any],
    updater: Any,
    *,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    load_format: str | None = None,
) -> Any:
    """Load what a request announces, around `WeightUpdater.receive_weights_from_distributed`.

    Return the tensors that SGLang still has to load: none. Its `original` handles requests without
    markers. After a failure this leaves the process groups, so that no sender waits for the server.
    """
    is_delta = changed_version(names) is not None
    is_file = group_name.startswith(FILE_PREFIX)
    if not is_file and not is_delta and not is_key_frame(names):
        return original(
            updater,
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group_name,
            load_format=load_format,
        )
    try:
        request = Manifest.read(names, dtypes, shapes)
        if is_file:
            flat = read_file(group_name.removeprefix(FILE_PREFIX)).to(updater.device)
            write_bucket(updater.get_model(), Bucket.around(request, flat))
        elif is_delta:
            for sender in range(request.shapes[0][0]):
                for flat in _receive_delta(updater, channel_name(group_name, sender)):
                    write_bucket(updater.get_model(), Bucket.around(request, flat))
        else:
            _receive_key_frame(updater, request, group_name)
    except Exception as error:
        leave(updater, group_name)
        raise RuntimeError(repr(error)) from error  # SGLang answers with the text alone
    return []


def _begin(updater: Any, channel: str, num_bytes: int) -> tuple[Tensor, Any]:
    """Begin to receive a bucket; return its buffer, `[bytes]` uint8, and the pending broadcast."""
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=updater.device)
    group = updater._model_update_group[channel]
    return flat, dist.broadcast(flat, src=0, group=group, async_op=True)


def _receive_delta(updater: Any, channel: str) -> Iterator[Tensor]:
    """Yield a sender's buckets of a delta, `[bytes]` uint8, up to the empty one."""
    group = updater._model_update_group[channel]
    on_gpu = dist.get_backend(group) == "nccl"
    size = torch.empty(1, dtype=torch.int64, device=updater.device if on_gpu else "cpu")
    while True:
        dist.broadcast(size, src=0, group=group)
        if not size:
            return
        flat, receiving = _begin(updater, channel, int(size))
        receiving.wait()
        yield flat


def _receive_key_frame(updater: Any, request: Manifest, group_name: str) -> None:
    """Receive a key frame; write each bucket while the next one arrives."""
    model, last = updater.get_model(), None
    for sender, manifest in read_key_frame(request):
        channel = channel_name(group_name, sender)
        flat, receiving = _begin(updater, channel, manifest.num_bytes)
        if last:
            write_bucket(model, last)
        receiving.wait()
        last = Bucket.around(manifest, flat)
    if last:
        write_bucket(model, last)
    if torch.device(updater.device).type == "cuda":
        torch.cuda.synchronize()


def leave(updater: Any, group_name: str) -> None:
    """Leave the process groups with all senders of one learner."""
    groups = updater._model_update_group
    for sender in itertools.count():
        group = groups.pop(channel_name(group_name, sender), None)
        if group is None:
            return
        with suppress(RuntimeError):  # the learner may have closed its end
            backend = dist.get_backend(group)
            kind = torch.device(updater.device if backend == "nccl" else "cpu")
            # Destroying a group closes no connection while an operation is under way.
            group._get_backend(kind).abort()
            dist.destroy_process_group(group)


def write_bucket(model: torch.nn.Module, bucket: Bucket) -> None:
    """Write a bucket of whole tensors, or of a delta, into a model's parameters."""
    held = held_parts(model)
    if changed_version(bucket.names) is not None:
        from qurl_megatron.weight_sync.delta import unpack

        for change in unpack(bucket.flat):
            for values, row, column in held.get(change.name, ()):
                change.write_to(values, row, column)
        return
    targets, sources = [], []
    for name, tensor in bucket.tensors():
        for values, row, column in held.get(name, ()):
            source = tensor.narrow(0, row, len(values))
            if values.dim() == 2:
                source = source.narrow(1, column, values.shape[1])
            targets.append(as_integers(values))
            sources.append(as_integers(source))
    if targets:
        torch._foreach_copy_(targets, sources)


def compute_checksum(
    checker: Any, skip_tensor_list: list[str] | None = None, *, role: str
) -> dict[str, Any]:
    """Return this rank's checksums, in place of `WeightChecker._compute_checksum`.

    SGLang's own checksums are of the fused and sharded tensors, so they depend on the layout.
    `skip_tensor_list` is ignored: every tensor is checked.
    """
    parts = _parts_by_key(checker)
    values = dict(zip(parts, checksums(parts.values()), strict=True))
    return {
        "checksums": {key: str(value) for key, value in values.items()},
        "per_gpu_checksum": str(sum(values.values())),
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def handle(
    original: Callable[..., Any], checker: Any, action: str, *, role: str, **options: Any
) -> Any:
    """Run an action of SGLang's weights checker, around `WeightChecker.handle`.

    The action `parameters` hands out the parameters to processes of this machine. Its answer has
    the form of `compute_checksum`, with texts of `direct.describe` in place of checksums.
    """
    if action != "parameters":
        return original(checker, action=action, role=role, **options)
    from qurl_megatron.weight_sync.direct import describe

    return {
        "checksums": {key: describe(part.values) for key, part in _parts_by_key(checker).items()},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def _parts_by_key(checker: Any) -> dict[str, Part]:
    """Return the parts of tensors that a checker's model holds, by `checksum.part_key`."""
    held = held_parts(checker._get_model())
    return {
        part_key(name, part.row, part.column): part
        for name, parts in held.items()
        for part in parts
    }


def held_parts(model: torch.nn.Module) -> dict[str, list[Part]]:
    """Return this rank's parameters, cut into the Hugging Face tensors they fuse, by name.

    Each name of a tensor has a list of parts. The lists are made once for a model, because its
    parameters stay where they are.
    """
    parts: dict[str, list[Part]] | None = getattr(model, "_qurl_held_parts", None)
    if parts is None:
        parts = {}
        for path, module in model.named_modules():
            for sent_name, part in _parts_of(module, path):
                parts.setdefault(sent_name, []).append(part)
        object.__setattr__(model, "_qurl_held_parts", parts)
    return parts


def _parts_of(module: torch.nn.Module, path: str) -> Iterator[HeldPart]:
    """Yield the parts of the parameters of the module at `path`, without its submodules'."""
    if isinstance(getattr(module, "attn", None), RadixLinearAttention):
        from qurl_megatron.sglang_plugin.delta_net import cut_delta_net

        yield from cut_delta_net(module, path)
    elif not isinstance(module, RadixLinearAttention) and not path.endswith(".conv1d"):
        path = _IN_ATTENTION.sub(r".self_attn.\1", path)
        for name, parameter in module.named_parameters(recurse=False):
            yield from _cut(module, path, name, parameter.detach())


def _cut(module: torch.nn.Module, path: str, name: str, tensor: Tensor) -> Iterator[HeldPart]:
    """Yield the parts of one parameter of the module at `path`."""
    if name in _ADAPTERS:
        yield from _cut_adapters(module, path, name, tensor)
        return
    rows_per_entry, width = 1, 1  # rows and columns of the weight; None: all columns
    if "weight_scale" in name:
        method: Any = module.quant_method
        rows_per_entry, width = method.block
    if fused := _projections(module, path):
        row = 0
        for projection, weight_rows, number in fused:
            rows = weight_rows // rows_per_entry
            yield f"{projection}.{name}", Part(tensor[row : row + rows], number * rows, 0)
            row += rows
    elif isinstance(module, FusedMoE):
        yield from _cut_experts(module, path, name, tensor, shares_columns=width is not None)
    elif isinstance(module, RowParallelLinear) and name.startswith("weight") and width:
        yield f"{path}.{name}", Part(tensor, 0, _tp_rank(module) * tensor.shape[1])
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        rows = shard.org_vocab_end_index - shard.org_vocab_start_index  # without padding
        yield f"{path}.{name}", Part(tensor[:rows], shard.org_vocab_start_index, 0)
    else:
        yield f"{path}.{name}", Part(tensor, 0, 0)


def _projections(module: torch.nn.Module, path: str) -> list[tuple[str, int, int]]:
    """Return a module's fused projections: path, rows on a rank, number of this rank's part."""
    parent, _, last = path.rpartition(".")
    rank, size = get_group_rank_size(getattr(module, "tp_group", None))
    if isinstance(module, QKVParallelLinear):
        # With more ranks than key heads, neighbouring ranks hold copies of one.
        kv_rank = get_group_rank_size(module.kv_tp_group)[0] // module.num_kv_head_replicas
        return [
            (f"{parent}.q_proj", module.q_proj_shard_size, rank),
            (f"{parent}.k_proj", module.kv_proj_shard_size, kv_rank),
            (f"{parent}.v_proj", module.v_proj_shard_size, kv_rank),
        ]
    if isinstance(module, MergedColumnParallelLinear):
        return [
            (f"{parent}.{name}", rows // size, rank)
            for name, rows in zip(_MERGED[last], module.output_sizes, strict=True)
        ]
    return []


def _tp_rank(module: torch.nn.Module) -> int:
    rank: int = get_group_rank_size(getattr(module, "tp_group", None))[0]
    return rank


def _cut_adapters(
    module: torch.nn.Module, path: str, name: str, tensor: Tensor
) -> Iterator[HeldPart]:
    """Yield the A's, or the B's, of a layer's projections; see `linear.py`."""
    is_row_parallel = isinstance(module, RowParallelLinear)
    fused = _projections(module, path) or [(path, len(tensor), 0)]
    adapters, row = tensor.chunk(len(fused), dim=0 if name == "lora_a" else 1), 0
    for (projection, rows, number), values in zip(fused, adapters, strict=True):
        part = Part(values, 0, _tp_rank(module) * values.shape[1] if is_row_parallel else 0)
        if name == "lora_b":
            part = Part(values[row : row + rows], number * rows, 0)
            row += rows
        yield f"{projection}.{_ADAPTERS[name]}", part


@torch.no_grad()
def clear_between_adapters(model: torch.nn.Module) -> None:
    """Set the B's of fused layers to 0 where they would multiply another projection's A.

    SGLang fills parameters with random numbers at its start, and a GPU does not clear memory that
    comes back after a sleep. The sent tensors do not cover these places.
    """
    for path, module in model.named_modules():
        wide = getattr(module, "lora_b", None)
        if wide is None:
            continue
        fused, row = _projections(module, path) or [(path, len(wide), 0)], 0
        rank = wide.shape[1] // len(fused)
        for number, (_, rows, _) in enumerate(fused):
            own = wide[row : row + rows]
            own[:, : number * rank].zero_()
            own[:, (number + 1) * rank :].zero_()
            row += rows


def _cut_experts(
    layer: FusedMoE, path: str, name: str, tensor: Tensor, *, shares_columns: bool
) -> Iterator[HeldPart]:
    """Yield the parts of a fused parameter `[experts, ...]` of a layer's experts on this rank."""
    fused, _, sent_name = name.partition("_")
    first = layer.moe_ep_rank * layer.num_local_experts
    for expert, values in enumerate(tensor, start=first):
        if fused == "w13":
            for projection, part in zip(("gate_proj", "up_proj"), values.chunk(2), strict=True):
                row = layer.moe_tp_rank * len(part)
                yield f"{path}.{expert}.{projection}.{sent_name}", Part(part, row, 0)
        else:
            # Ranks divide the columns; but if a scale covers a whole row, each rank has all scales.
            column = layer.moe_tp_rank * values.shape[1] if shares_columns else 0
            yield f"{path}.{expert}.down_proj.{sent_name}", Part(values, 0, column)
