"""The plugin's arithmetic without a server; tests/e2e/test_server.py runs it in a real one."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from qurl_megatron.model.architecture import _BLOCK_WIDTHS
from qurl_megatron.quantization import products
from qurl_megatron.quantization.activations import quantize_tokens
from qurl_megatron.quantization.quantize import (
    ENGINE_METHODS,
    block_shape,
    code_dtype,
    dequantize,
    pack,
    packing,
    quantize,
    scale_dtype,
)
from qurl_megatron.sglang_plugin import attention, memory, platform, sampling, weights
from qurl_megatron.sglang_plugin.formats import (
    CONFIGS,
    Fp8BlockConfig,
    Fp8Config,
    Int4Config,
    Int4Group32Config,
    Int8Config,
    QurlConfig,
)
from qurl_megatron.sglang_plugin.linear import MAX_TOKENS

NUM_SLOTS, HEAD_SIZE, KEY_HEADS = 400, 16, 2


def torch_native(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    num_new: torch.Tensor,
) -> torch.Tensor:
    """Compute attention by SGLang's loop over sequences, which batched attention replaces."""
    backend = object.__new__(TorchNativeAttnBackend)  # the method called uses no state
    return backend._run_sdpa_forward_extend(
        query,
        torch.empty_like(query),
        keys,
        values,
        slots,
        torch.arange(len(lengths)),
        lengths,
        lengths - num_new,
        num_new,
        scaling=HEAD_SIZE**-0.5,
        enable_gqa=query.shape[1] != KEY_HEADS,
        causal=True,
    )


@pytest.mark.parametrize("num_heads", [KEY_HEADS, 4 * KEY_HEADS])
@pytest.mark.parametrize(
    "num_new",
    [[1, 1, 1, 1, 1], [31, 7, 64, 1, 12], [3, 1, 20, 1, 12]],
    ids=["decode", "prefill", "behind a cached prefix"],
)
@pytest.mark.parametrize(
    ("max_pairs", "max_keys"), [(1 << 20, 5 * 64), (2000, 5 * 64), (1 << 20, 5 * 64 - 1), (1, 1)]
)
def test_batched_attention_equals_a_loop_over_sequences(
    num_heads: int,
    num_new: list[int],
    max_pairs: int,
    max_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "MAX_GROUP_PAIRS", max_pairs)
    monkeypatch.setattr(attention, "MAX_GROUP_KEYS", max_keys)
    torch.manual_seed(0)
    lengths, new = torch.tensor([31, 7, 64, 1, 12]), torch.tensor(num_new)
    slots = torch.randperm(NUM_SLOTS)[: 5 * 64].view(5, 64)
    keys, values = torch.randn(2, NUM_SLOTS, KEY_HEADS, HEAD_SIZE)
    query = torch.randn(sum(num_new), num_heads, HEAD_SIZE)

    groups = attention.group_sequences(slots, lengths, new)
    assert (len(groups) == 1) == (5 * 64 <= max_keys and new.max() * 64 * 5 <= max_pairs)
    out = torch.cat(
        [attention.attend(query[g.tokens], keys, values, g, HEAD_SIZE**-0.5) for g in groups]
    )
    expected = torch_native(query, keys, values, slots, lengths, new)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["qurl_int8", "qurl_int4", "qurl_fp8", "qurl_fp8_block"])
def test_a_product_is_of_the_new_weight_once_the_old_one_is_forgotten(name: str) -> None:
    layer = build_layer(CONFIGS[name](), 256, [128])
    x = torch.ones(3, 256, dtype=torch.bfloat16)
    assert not layer.method.apply(layer, x).any()
    layer.weight.data.view(torch.uint8).fill_(0x99)
    products.forget()
    assert layer.method.apply(layer, x).all()


def test_int8_layers_compute_each_token_as_if_it_were_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = build_layer(Int8Config(), 64, [24])
    layer.weight.data.copy_(torch.randint(-127, 128, (24, 64), generator=generator))
    products.forget()
    x = torch.randn(MAX_TOKENS + 3, 64, generator=generator).bfloat16()
    bias = torch.randn(24, generator=generator).bfloat16()
    alone = [layer.method.apply(layer, token, bias) for token in x.split(1)]
    assert torch.equal(layer.method.apply(layer, x, bias), torch.cat(alone))


@pytest.mark.parametrize("size", [1, 64, 65, 259, 1000])
def test_draws_have_the_weights_as_frequencies(size: int) -> None:
    """Ratios of weights are up to 2,000, and many are 0: at the ends, and at those of blocks."""
    torch.manual_seed(size)
    weights = torch.rand(size).pow(4).clamp(min=5e-4)
    if size > 1:
        weights[torch.rand(size) < 0.3] = 0
        weights[0] = weights[63:65] = 0
        weights[1] = weights[-1] = 1e-3
    counts = torch.zeros(size)
    for _ in range(100):
        drawn = sampling.draw(weights.expand(10_000, size), num_samples=1)
        assert drawn.shape == (10_000, 1) and drawn.dtype == torch.int64
        counts += drawn.flatten().bincount(minlength=size)
    assert not counts[weights == 0].any()
    expected = weights.double() / weights.double().sum() * 1e6
    possible = expected > 0
    chi_square = ((counts - expected)[possible].square() / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square <= freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53], ids=["smallest", "largest"])
def test_the_smallest_and_the_largest_random_number_draw_what_is_possible(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, number))
    weights = torch.zeros(3, 1000)
    weights[0, 130] = 1e-30
    weights[1, [0, 999]] = torch.tensor([1e-8, 0.3])
    weights[2, 64:640] = 0.1
    expected = [130, 0, 64] if number == 0 else [130, 999, 639]
    assert sampling.draw(weights, num_samples=1).flatten().tolist() == expected


def test_each_token_has_its_own_scale_and_codes_round_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-1.27, 0.4, 0.0, 1.0]])
    codes, scale = quantize_tokens(x, torch.int8)
    assert codes.tolist()[0] == [127, 0, 2, -2]
    assert codes.tolist()[1] == [0, 0, 0, 0]
    assert codes.tolist()[2] == [-127, 40, 0, 100]
    assert scale[0] == 1


def build_layer(config: QurlConfig, input_size: int, output_sizes: list[int]) -> Any:
    """Build a layer of these widths with its method, as SGLang does."""
    layer: Any = torch.nn.Module()
    layer.method = config.linear_method(config)
    layer.method.create_weights(
        layer,
        input_size,
        output_sizes,
        input_size,
        sum(output_sizes),
        torch.bfloat16,
        weight_loader=lambda *arguments: None,
    )
    layer.method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize(
    ("config", "scale_name", "scale_shape"),
    [
        (Int8Config(), "weight_scale", (384, 1)),
        (Fp8Config(), "weight_scale", (384, 1)),
        (Fp8BlockConfig(), "weight_scale_inv", (3, 2)),
        (Int4Config(), "weight_scale", (384, 2)),
        (Int4Group32Config(), "weight_scale", (384, 8)),
    ],
)
def test_a_layer_starts_with_zero_weights_and_never_replaces_a_parameter(
    config: QurlConfig, scale_name: str, scale_shape: tuple[int, int]
) -> None:
    layer = build_layer(config, 256, [256, 128])
    before = dict(layer.named_parameters())
    bias = torch.arange(384.0).bfloat16()
    out = layer.method.apply(layer, torch.ones(2, 3, 256, dtype=torch.bfloat16), bias)
    assert torch.equal(out, bias.expand(2, 3, 384))
    assert {name: id(p) for name, p in layer.named_parameters()} == {
        name: id(p) for name, p in before.items()
    }
    assert {name: p.shape for name, p in before.items()} == {
        "weight": (384, 256 // layer.method.packing),
        scale_name: scale_shape,
    }


def test_a_layer_with_partial_blocks_multiplies_by_its_dequantized_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(300, 200, generator=generator), torch.ones(1, 200)
    x[0, 150] = 3.0  # in x's second block, 1 is then rounded; the first block, of ones, is exact
    quantized = quantize(weight, "fp8-block")
    layer = build_layer(Fp8BlockConfig(), 200, [300])
    layer.weight.data.copy_(quantized.codes)
    layer.weight_scale_inv.data.copy_(quantized.scale)
    out = layer.method.apply(layer, x.bfloat16()).float()
    codes, scale = quantize_tokens(x[:, 128:], torch.float8_e4m3fn)
    rounded = torch.cat([x[:, :128], codes * scale], dim=1)
    torch.testing.assert_close(out, rounded @ dequantize(quantized).t(), rtol=4e-3, atol=1e-3)


def test_int4_multiplies_activations_as_they_are_by_values_rounded_to_bfloat16() -> None:
    """The second group of row 0 has the scale 1.0078125, and 7 times it is 7.0546875.

    The bfloat16 numbers next to that are 7.03125 and 7.0625.
    """
    layer = build_layer(Int4Group32Config(), 64, [2])
    codes = torch.zeros(2, 64)
    codes[0, 3], codes[0, 40], codes[1, 5] = -7, 7, 1
    layer.weight.data.copy_(pack(codes))
    layer.weight_scale.data.copy_(torch.tensor([[0.5, 1.0078125], [3.0, 1.0]]))
    x = torch.zeros(3, 64)
    x[0, 3], x[1, 40], x[2, 5] = 1.0, 1.0, 0.3
    out = layer.method.apply(layer, x.bfloat16())
    assert out.tolist() == [[-3.5, 0.0], [7.0625, 0.0], [0.0, 0.90234375]]  # 3 * bfloat16(0.3)


@pytest.mark.parametrize("name", ENGINE_METHODS)
def test_layers_and_layouts_have_the_blocks_and_types_that_the_learner_quantizes_to(
    name: str,
) -> None:
    layer = CONFIGS[ENGINE_METHODS[name]].linear_method
    assert layer.code_dtype == code_dtype(name) and layer.packing == packing(name)
    assert layer.scale_dtype == scale_dtype(name)
    if name != "fp8-tensor":  # its one scale is sent for each channel
        assert layer.block == block_shape(name)
    assert _BLOCK_WIDTHS.get(name) == block_shape(name)[1]


def test_a_block_that_would_belong_to_two_fused_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\[256, 64\].*multiples of 128"):
        build_layer(Fp8BlockConfig(), 128, [256, 64])
    with pytest.raises(ValueError, match="qurl_int4: 192 input channels.* not divide into groups"):
        build_layer(Int4Config(), 192, [64])


def test_a_server_waits_for_weights_for_a_limited_time_and_a_learner_keeps_its_own_limit() -> None:
    """The hook also changes the function in a learner that is forked beside the servers."""

    def join(**options: Any) -> dict[str, Any]:
        return options

    own = timedelta(seconds=3)
    assert weights.join_group(join, rank=1) == {"rank": 1, "timeout": timedelta(seconds=120)}
    assert weights.join_group(join, rank=0, timeout=own) == {"rank": 0, "timeout": own}


@pytest.mark.parametrize(
    ("name", "held", "is_loaded"),
    [
        ("delta of version 6", 6, True),
        ("delta of version 6", 7, True),  # the second bucket of the delta
        ("delta of version 6", 5, False),
        ("delta of version 6", 8, False),
        ("delta of version 6", 0, False),  # a server that was started again
        ("model.norm.weight", 5, True),
    ],
)
def test_a_scheduler_takes_a_delta_of_the_version_it_holds_only(
    name: str, held: int, is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes the channels of a delta that it refuses, because the senders wait for it."""
    left: list[Any] = []
    monkeypatch.setattr(weights, "leave", lambda *arguments: left.append(arguments))
    loaded: list[Any] = []
    waiting = SimpleNamespace(extra_key="of its arrival")
    scheduler = SimpleNamespace(
        loaded_version=held,
        waiting_queue=[waiting],
        device_module=SimpleNamespace(synchronize=lambda: loaded.append("waited")),
    )
    runner = SimpleNamespace(weight_updater="the updater", model=torch.nn.Module())
    updater = SimpleNamespace(
        scheduler=scheduler,
        tp_worker=SimpleNamespace(model_runner=runner),
        begin_weight_update=lambda request: loaded.append("begun"),
        end_weight_update=lambda request: loaded.append("ended"),
    )
    request = SimpleNamespace(names=[name], weight_version="7", shapes=[[24]], group_name="weights")
    weight = torch.ones(2, 2)
    before = products.kept(weight, torch.clone)

    def load(updater: Any, request: Any) -> Any:
        loaded.append(request)
        return SimpleNamespace(success=True)

    answer = weights.update_weights(load, updater, request)
    assert answer.success == is_loaded
    assert (products.kept(weight, torch.clone) is not before) == is_loaded
    assert loaded == (["waited", "begun", request, "ended"] if is_loaded else [])
    assert scheduler.loaded_version == (7 if is_loaded else held)
    assert waiting.extra_key == ("weights 7" if is_loaded else "of its arrival")
    assert left == ([] if is_loaded else [("the updater", "weights")])
    if not is_loaded:
        assert answer.message == f"it holds version {held}, and was sent a delta of 6"


def test_a_server_keeps_one_record_of_its_weight_version_however_many_it_is_sent() -> None:
    context = SimpleNamespace(_overrides_log=[])

    def record(context: Any, source: str, **fields: Any) -> None:
        context._overrides_log.append((source, fields))

    weights.keep_newest(record, context, "load", load_format="auto", weight_version="0")
    for version in range(1, 100):
        weights.keep_newest(record, context, "version", weight_version=str(version))
    newest = ("version", {"weight_version": "99"})
    assert context._overrides_log == [
        ("load", {"load_format": "auto", "weight_version": "0"}),
        newest,
    ]


def test_a_server_releases_unused_memory_when_it_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import platforms
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    done = []
    fake = SimpleNamespace(empty_cache=lambda: done.append("released"))
    monkeypatch.setattr(platforms, "current_platform", fake)
    request = ContinueGenerationReqInput()
    platform.resume(lambda *arguments: done.append("resumed"), "the scheduler", request)
    assert done == ["released", "resumed"]


def test_an_emptied_cache_is_freed_at_once_although_its_nodes_refer_to_each_other() -> None:
    class Node:
        parent: Node

    node = Node()
    node.parent = node
    freed = weakref.ref(node)
    del node
    assert freed() is not None
    platform.CpuPlatform().empty_cache()
    assert freed() is None


def test_a_kv_cache_takes_memory_only_where_it_is_written() -> None:
    def create(pool: Any) -> None:
        pool.buffer = torch.zeros((2**17, 2, 512), dtype=torch.bfloat16, device=pool.device)

    pool, process = SimpleNamespace(device="cpu"), psutil.Process()
    before = process.memory_info().rss
    memory.create_cache(create, pool)
    pool.buffer[7] = 1
    assert process.memory_info().rss - before < 2**24 < pool.buffer.nbytes / 8
    assert pool.buffer[7].sum() == 1024 and pool.buffer[6].sum() == pool.buffer[-1].sum() == 0
    memory.give_back(pool.buffer)
    assert pool.buffer[7].sum() == 0


def test_states_of_linear_attention_take_memory_only_where_they_are_written() -> None:
    def create(pool: Any, *, size: int, device: str) -> None:
        pool.states = torch.zeros(size=(2, size, 2**14), dtype=torch.float32, device=device)

    pool, process = SimpleNamespace(), psutil.Process()
    before = process.memory_info().rss
    memory.create_states(create, pool, size=1024, device="cpu")
    pool.states[:, 7] = 1
    assert process.memory_info().rss - before < 2**23 < pool.states.nbytes / 8
    assert pool.states.dtype == torch.float32 and pool.states.sum() == 2**15


@pytest.mark.parametrize("weight_format", ["int8", "fp8", "int4-g32"])
def test_rounding_loses_nothing_of_adapters_that_are_small_beside_their_base(
    weight_format: str,
) -> None:
    """Rounding the base's product, and then the sum, would lose more than half of these."""
    config = CONFIGS[ENGINE_METHODS[weight_format]]((), {"rank": 4, "alpha": 16.0})
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    base = quantize(normal(256, 64), weight_format)
    x = normal(128, 64).bfloat16()
    layer = SimpleNamespace(weight=base.codes, weight_scale=base.scale)
    layer.lora_a, layer.lora_b = normal(4, 64).bfloat16(), torch.zeros(256, 4).bfloat16()
    products.forget()
    without = config.linear_method(config).apply(layer, x)
    assert without.dtype == torch.bfloat16
    layer.lora_b = (1e-4 * normal(256, 4)).bfloat16()
    products.forget()
    added = (config.linear_method(config).apply(layer, x) - without).float()
    expected = 4 * x.float() @ layer.lora_a.float().t() @ layer.lora_b.float().t()
    assert expected.norm() < 2e-3 * without.float().norm()
    shown = (added * expected).sum() / expected.square().sum()
    assert shown == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("method", ["qurl_int8", "qurl_fp8"])
def test_on_a_gpu_products_are_in_float32_and_nothing_is_kept(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has no oneDNN, and `_int_mm` asks for more than 16 tokens there."""
    linear_method = CONFIGS[method]().linear_method(CONFIGS[method]())
    x, scale = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(8, 1)
    codes = torch.ones(8, 32).to(linear_method.code_dtype)
    products.forget()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for absent in ("in_int8", "packed_int8"):
        monkeypatch.delattr(products, absent)
    products.int8_product.cache_clear()
    out = linear_method.multiply_cpu(x, codes, scale, None)
    assert torch.equal(out, torch.full((3, 8), 32.0).bfloat16())
    assert torch.equal(products.multiply_unquantized(x, codes.bfloat16()), out)
    assert not products._kept
