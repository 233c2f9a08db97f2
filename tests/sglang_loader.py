"""SGLang's own models and weight loaders without a server, one rank after another."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.model.huggingface import served_directory


@contextmanager
def engine(model_dir: Path) -> Iterator[None]:
    """Set up what SGLang needs to build a model: process groups of one rank, and its arguments."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.models.registry import import_model_classes
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    import_model_classes("sglang.srt.models")  # cached; fails under a meta default device
    arguments = ServerArgs(model_path=str(model_dir), device="cpu")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    try:
        yield
    finally:
        reset_context()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def as_rank(rank: int, size: int, expert_parallel_size: int = 1) -> AbstractContextManager[Any]:
    """Make SGLang take this process for tensor-parallel rank `rank` of `size`.

    Neighbouring ranks, `size / expert_parallel_size` of them, share the same experts.
    """
    from sglang.srt.runtime_context import get_parallel

    attention = {"attn_tp_size": size, "attn_tp_rank": rank, "attn_dp_size": 1, "attn_dp_rank": 0}
    sharing = size // expert_parallel_size
    experts = {
        "moe_ep_size": expert_parallel_size,
        "moe_ep_rank": rank // sharing,
        "moe_tp_size": sharing,
        "moe_tp_rank": rank % sharing,
    }
    parallel = get_parallel()

    def group_of(rank: int, size: int) -> Any:  # layers ask their group for their rank
        group: Any = copy(parallel.tp_group)
        group.rank_in_group, group.world_size = rank, size
        return group

    whole = group_of(rank, size)
    groups = {
        "tp_group": whole,
        "attn_tp_group": whole,
        "moe_ep_group": group_of(experts["moe_ep_rank"], experts["moe_ep_size"]),
        "moe_tp_group": group_of(experts["moe_tp_rank"], experts["moe_tp_size"]),
    }
    return parallel.override(tp_size=size, tp_rank=rank, **attention, **experts, **groups)


def build(model_dir: Path, weight_format: str, adapters: Mapping[str, float] | None = None) -> Any:
    """Build SGLang's model for the current rank, on torch's default device."""
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.utils.hf_transformers_utils import get_config

    from qurl_megatron.sglang_plugin import formats

    quantization = {
        "bf16": None,
        "int8": formats.Int8Config,
        "int4": formats.Int4Config,
        "int4-g32": formats.Int4Group32Config,
        "fp8": formats.Fp8Config,
        "fp8-tensor": formats.Fp8Config,
        "fp8-block": formats.Fp8BlockConfig,
    }[weight_format]
    with TemporaryDirectory() as written:
        served = served_directory(model_dir, Path(written) / "model")
        config = get_config(str(served), trust_remote_code=False)
    model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        described = getattr(config, "quantization_config", None) or {}
        kept = described.get("modules_to_not_convert", ())
        return model_class(config, quantization(kept, adapters) if quantization else None)
    finally:
        torch.set_default_dtype(before)


def build_ranks(
    model_dir: Path, weight_format: str, size: int, expert_parallel_size: int = 1
) -> list[Any]:
    """Build SGLang's model for each rank of a server of `size`."""
    models = []
    for rank in range(size):
        with as_rank(rank, size, expert_parallel_size):
            models.append(build(model_dir, weight_format))
    return models


def load(ranks: Sequence[Any], sent: Mapping[str, Tensor], expert_parallel_size: int = 1) -> None:
    """Load a copy of `sent` into each rank's model, as SGLang does."""
    for rank, model in enumerate(ranks):
        with as_rank(rank, len(ranks), expert_parallel_size):
            model.load_weights((name, tensor.clone()) for name, tensor in sent.items())


def checksums_of(ranks: Sequence[Any]) -> dict[str, int]:
    """Return the checksums that a server of these ranks answers with, combined."""
    from qurl_megatron.quantization.checksum import combine
    from qurl_megatron.sglang_plugin.weights import compute_checksum

    held = []
    for model in ranks:
        answer = compute_checksum(checker_of(model), role="target")["checksums"]
        held.append({key: int(value) for key, value in answer.items()})
    return combine(held)


def checker_of(model: Any) -> Any:
    """Return what stands for SGLang's `WeightChecker` of a model."""
    return SimpleNamespace(
        _get_model=lambda: model, _parallelism_info=lambda role: SimpleNamespace(model_dump=dict)
    )


def hold(ranks: Sequence[Any], sent: Mapping[str, Tensor]) -> bool:
    """Return True if the ranks together hold the tensors of `sent` and no others, bit for bit."""
    return same_bytes(whole_tensors(ranks, sent), sent)


def same_bytes(held: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    return held.keys() == sent.keys() and all(
        torch.equal(held[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
        for name, tensor in sent.items()
    )


def send_changes(
    ranks: Sequence[Any], held: Mapping[str, Tensor], sent: Mapping[str, Tensor]
) -> None:
    """Write what differs between `held` and `sent` into the ranks, as a publish of a delta does."""
    from qurl_megatron.sglang_plugin.weights import write_bucket
    from qurl_megatron.weight_sync import delta
    from qurl_megatron.weight_sync.delta_gather import delta_bucket

    changes = [delta.compare(name, (0, 0), held[name], sent[name]) for name in sent]
    message = delta.pack([change for change in changes if change], torch.device("cpu"))
    for model in ranks:
        write_bucket(model, delta_bucket(1, message))


def whole_tensors(ranks: Sequence[Any], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full tensors that the ranks hold together, of the shapes of `sent`.

    Fails if ranks hold different values of the same element, or if no rank holds it.
    """
    from qurl_megatron.sglang_plugin.weights import held_parts

    whole = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in sent.items()}
    seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in sent.items()}
    for rank, model in enumerate(ranks):
        held = [(name, part) for name, parts in held_parts(model).items() for part in parts]
        for name, (tensor, row, column) in held:
            index: tuple[slice, ...] = (slice(row, row + tensor.shape[0]),)
            if tensor.dim() == 2:
                index = (*index, slice(column, column + tensor.shape[1]))
            target, is_seen = whole[name][index], seen[name][index]
            assert target.shape == tensor.shape, f"{name} reaches beyond its end on rank {rank}"
            assert torch.equal(
                target[is_seen].view(torch.uint8), tensor[is_seen].view(torch.uint8)
            ), f"{name} differs between ranks"
            target.copy_(tensor)
            is_seen.fill_(True)
    for name, is_seen in seen.items():
        assert is_seen.all(), f"no rank holds some elements of {name}"
    return whole
