"""Adapters sent to servers, saved, resumed on another layout, and written for peft."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batches import score, share_of
from distributed import run_ranks
from extensions.adapters.adapters_reference import (
    ALPHA,
    PLAIN,
    RANK,
    WHOLE_GROUPS,
    Adapted,
    adapt,
    base_of,
    write_b,
)
from learner_reference import (
    BUDGET,
    DIMS,
    DP2,
    EP2,
    EXPERTS,
    FULL,
    PP2,
    TP2,
    gathered,
    learner_config,
    logprobs_and_entropy_of,
    make_batch,
    make_rows,
    parts_of,
    policy_gradient,
)
from qurl_megatron.config.schema import (
    AdaptersConfig,
    Config,
    ConfigError,
    Rounding,
    UaqConfig,
    WeightFormat,
)
from qurl_megatron.evaluation.evaluate import EvalConfig, served_model
from qurl_megatron.extensions.adapters import export
from qurl_megatron.extensions.adapters.files import (
    base_hash,
    check_adapters,
    check_start,
    merge_directory,
    read_adapters,
    write_adapters,
)
from qurl_megatron.extensions.adapters.layers import Adapters, FrozenBase, _BaseProduct
from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.model.huggingface import Weights
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.quantization.quantize import quantize
from qurl_megatron.quantization.rounding import write_rounded
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.conversion import Conversion
from sent import as_bytes, tensors_in
from tiny import build_tiny_model, quantized

BUCKET_BYTES = 20_000
LAYOUTS: dict[str, tuple[Family, WeightFormat, dict[str, Any], int]] = {
    "TP1": ("qwen2", "int8", {}, 1),
    "TP2xPP2": ("qwen3", "int4-g32", {**TP2, **PP2}, 4),
    "TP2xDP2": ("qwen2", "fp8", {**TP2, **DP2}, 4),
    "experts": ("qwen3_moe", "int8", {**EP2, **DP2}, 2),
}


def build(directory: Path, family: Family, weight_format: WeightFormat = "int8") -> Path:
    dims = EXPERTS if family == "qwen3_moe" else DIMS
    dims = dims | (WHOLE_GROUPS if weight_format == "int4-g32" else {})
    return build_tiny_model(directory, family, tied=family == "qwen2", **dims)


def learner_of(model: Path, layout: dict[str, Any], adapters: Adapters, dtype: str) -> Any:
    from qurl_megatron import device
    from qurl_megatron.extensions.adapters.learner import AdaptedLearner

    device.initialize_distributed()
    return AdaptedLearner(model, learner_config(layout, dtype=dtype), PLAIN, adapters=adapters)


@dataclass
class Sent:
    """What one rank sent: all, and then, with other adapters, what servers of the base need."""

    first: list[Bucket]
    second: list[Bucket]
    conversions: list[Conversion]
    merged: list[Bucket]  # in BF16, after that


def convert(model: Path, layout: dict[str, Any], weight_format: WeightFormat) -> Sent:
    from qurl_megatron.weight_sync.reshard import Converter

    learner = learner_of(model, layout, Adapters(RANK, ALPHA, weight_format), "float32")
    converter = Converter(learner, weight_format, BUCKET_BYTES)
    sent = Sent([], [], [], [])
    sent.conversions.append(converter.convert(sent.first.append))
    write_b(learner)
    sent.conversions.append(converter.convert(sent.second.append, since=1))
    Converter(learner, "bf16", BUCKET_BYTES).convert(sent.merged.append)
    learner.close()
    return sent


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_base_is_sent_once_as_its_codes_and_then_adapters_alone(
    name: str, tmp_path: Path
) -> None:
    family, weight_format, layout, num_ranks = LAYOUTS[name]
    model = build(tmp_path, family, weight_format)
    ranks = run_ranks(convert, num_ranks, model, layout, weight_format)
    first, second, merged = (
        tensors_in([bucket for rank in ranks for bucket in getattr(rank, part)])
        for part in ("first", "second", "merged")
    )
    base = quantized(model, weight_format)
    adapters = {each for each in first if ".lora_" in each}
    assert first.keys() - adapters == base.keys()
    for each, tensor in base.items():
        assert as_bytes(first[each]) == as_bytes(tensor), each
    assert second.keys() == adapters and adapters
    assert all(first[each].any() == (".lora_A." in each) for each in adapters)
    assert all(second[each].any() for each in adapters)
    before, after = ranks[0].conversions
    assert before.checksums == {each: checksum(tensor) for each, tensor in first.items()}
    assert after.checksums == {each: checksum(t) for each, t in (first | second).items()}
    assert before.drift.keys() == after.drift.keys() == adapters
    for each, drift in after.drift.items():  # only B was written
        assert drift.code_flip_fraction == pytest.approx(float(".lora_B." in each)), each
        assert 0 < drift.quant_error < 2**-16
    assert before.num_bytes == after.num_bytes > 2 * sum(t.nbytes for t in second.values())
    reference = base_of(model, weight_format).bfloat16()
    adapt(reference, {each: tensor.float() for each, tensor in second.items()})
    whole = values_of(reference)
    assert merged.keys() == whole.keys()
    for each, tensor in whole.items():
        torch.testing.assert_close(merged[each].float(), tensor, rtol=0.01, atol=2e-3)


def first_adapters(model: Path, rank: int) -> dict[str, float]:
    learner = learner_of(model, {}, Adapters(rank, ALPHA, "int8"), "float32")
    found = [(name, value) for name, rule, _, value in learner._parameters() if rule.is_adapter]
    return {name: value.abs().sum().item() for name, value in found}


def test_an_a_as_wide_as_its_rank_is_drawn_too(tmp_path: Path) -> None:
    model = build(tmp_path, "qwen2")
    (sums,) = run_ranks(first_adapters, 1, model, DIMS["hidden_size"])
    assert sums and all((total > 0) == ("lora_a" in name) for name, total in sums.items())


def test_a_learner_in_bf16_multiplies_with_the_scales_of_the_servers() -> None:
    """Rounded to BF16, one would move a whole row by up to 0.2 %."""
    torch.manual_seed(0)
    x = torch.randn(512, 256).bfloat16().requires_grad_()
    base = quantize(torch.randn(512, 256), "int8")
    codes, scale = base.codes, base.scale
    exact = x.detach().double() @ (codes.double() * scale.double()).t()
    out = _BaseProduct.apply(x, codes, scale)
    factors = (out.double() * exact).sum(0) / exact.square().sum(0)
    assert (factors - 1).abs().mean() < 3e-4
    out.backward(grad := torch.randn(512, 512).bfloat16())
    expected = grad.double() @ (codes.double() * scale.double())
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected, rtol=0.02, atol=0.3)


def values_of(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model with adapters under their Hugging Face names, merged."""
    from qurl_megatron.model.transformers_model import checkpoint_tensors

    values = {}
    for name, tensor in checkpoint_tensors(model):
        if name.endswith((".a", ".b")):
            continue
        path = name.removesuffix(".base.weight")
        if path != name:
            layer = model.get_submodule(path)
            update = ALPHA / RANK * layer.b @ layer.a
            values[f"{path}.weight"] = (tensor.double() + update).detach().float()
        else:
            values[name.replace(".base.", ".")] = tensor.detach().float()
    return values


def train_and_save(model: Path, layout: dict[str, Any], directory: Path, dtype: str) -> Any:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from qurl_megatron import device
    from qurl_megatron.learner.cpu_runtime import megatron_runtime
    from qurl_megatron.weight_sync.export import export

    learner = learner_of(model, layout, Adapters(RANK, ALPHA, "int8"), dtype)
    share = share_of(learner, make_batch())
    for _ in range(4):
        learner.update(share, policy_gradient, temperature=0.7)
    with megatron_runtime():
        if device.rank() == 0:
            (directory / "saved").mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(learner.sharded_state(), str(directory / "saved"))
    filesystem_async._results_queue._manager.shutdown()  # Megatron's, which outlives a rank
    filesystem_async._results_queue = None
    export(learner, model, directory / "final_model", UaqConfig())
    return state_of(learner)


def resume(model: Path, layout: dict[str, Any], directory: Path, dtype: str) -> Any:
    from megatron.core import dist_checkpointing

    from qurl_megatron.learner.cpu_runtime import megatron_runtime

    learner = learner_of(model, layout, Adapters(RANK, ALPHA, "int8"), dtype)
    with megatron_runtime():
        saved = dist_checkpointing.load(learner.sharded_state(), str(directory / "saved"))
        learner.restore(saved, step=4)
    return state_of(learner)


FACTOR = 3 / 2  # of what a product is multiplied by, with thrice the alpha over twice the rank


def begin(model: Path, layout: dict[str, Any], init: Path, dtype: str) -> Any:
    """Begin with adapters of half the rank and another alpha."""
    adapters = Adapters(2 * RANK, 3 * ALPHA, "int8", init=str(init))
    return state_of(learner_of(model, layout, adapters, dtype))


def state_of(learner: Any) -> Any:
    """Return masters, scores, the hash of the base, the next update, and parameters."""
    masters, parameters = (
        parts_of(learner, [each for each in weights if each[0].is_adapter])
        for weights in (learner.masters(), learner.shards())
    )
    scores = score(learner, make_rows().tokens, temperature=0.7)
    share = share_of(learner, make_batch())
    update = learner.update(share, policy_gradient, temperature=0.7)
    found = masters, scores[0], learner.base_hash(), update.grad_norm, parameters
    learner.close()
    return found


@pytest.mark.parametrize("weight_format", ["int8", "int4-g32"])
def test_rounding_loses_nothing_of_adapters_that_are_small_beside_their_base(
    weight_format: Any,
) -> None:
    """As in a server's layer; a learner in BF16 must not hide what its servers show."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    base = quantize(normal(256, 64), weight_format)
    layer: Any = FrozenBase()
    layer.sequence_parallel = False
    layer.allocate(256, 64, Adapters(4, 16.0, weight_format), torch.bfloat16)
    layer.codes.copy_(base.codes)
    layer.scale.copy_(base.scale)
    layer.add_adapters(torch.ones(256, 1, dtype=torch.bool), "lora_a")
    x, b = normal(128, 64).bfloat16(), 1e-4 * normal(256, 4)
    with torch.no_grad():
        layer.lora_a.copy_(normal(4, 64))
        low = x @ layer.lora_a.t()
        without = layer.add_b(layer.multiply_base(x), low)
        layer.lora_b.copy_(b)
        added = (layer.add_b(layer.multiply_base(x), low) - without).float()
    assert without.dtype == torch.bfloat16
    expected = 4 * x.float() @ layer.lora_a.detach().float().t() @ b.t()
    assert expected.norm() < 2e-3 * without.float().norm()
    shown = (added * expected).sum() / expected.square().sum()
    assert shown == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_layout_resumes_and_peft_and_transformers_get_what_was_trained(
    dtype: str, tmp_path: Path
) -> None:
    model = build(tmp_path / "model", "qwen2")
    layout = {**PP2, **DP2, **BUDGET, **FULL}
    saved = run_ranks(train_and_save, 4, model, layout, tmp_path, dtype)
    resumed = run_ranks(resume, 2, model, TP2, tmp_path, dtype)
    before, after = (gathered([rank[0] for rank in ranks]) for ranks in (saved, resumed))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for ranks in (saved, resumed):  # in BF16, masters are rounded by their position in the whole
        for name, values in gathered([rank[4] for rank in ranks]).items():
            expected = torch.empty_like(values)
            write_rounded(expected, before[name], name, "unbiased")
            assert torch.equal(values, expected), name
    begun = run_ranks(begin, 2, model, TP2, tmp_path / "final_adapters", dtype)
    hashes = {rank[2] for rank in (*saved, *resumed)}
    assert hashes == {base_hash(model, "int8")} == {read_adapters(tmp_path / "final_adapters").base}
    assert resumed[0][3] == pytest.approx(saved[0][3], rel=1e-5 if dtype == "float32" else 0.05)
    atol = 2e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(saved[0][1], resumed[0][1], rtol=0, atol=atol)
    torch.testing.assert_close(saved[0][1], begun[0][1], rtol=0, atol=atol)
    more = gathered([rank[0] for rank in begun])
    for name, values in before.items():
        own = more[name][: len(values)] if ".lora_A." in name else more[name][:, :RANK] * FACTOR
        torch.testing.assert_close(own, values, rtol=1e-6, atol=0)

    adapters = read_adapters(tmp_path / "final_adapters")
    assert adapters.weight_format == "int8"
    assert all(torch.equal(adapters.tensors[name], before[name]) for name in before)
    reference = base_of(model, "int8")
    adapt(reference, before)
    with torch.no_grad():
        expected, _ = logprobs_and_entropy_of(reference, make_rows().tokens, 0.7)
    torch.testing.assert_close(saved[0][1], expected.float(), rtol=0, atol=max(atol, 2e-4))
    merged = base_of(tmp_path / "final_model", "bf16")  # as it is stored, in BF16
    layers = {name: each for name, each in reference.named_modules() if isinstance(each, Adapted)}
    assert layers
    for name, layer in layers.items():
        product = ALPHA / RANK * layer.b @ layer.a
        found = merged.get_submodule(name).weight
        torch.testing.assert_close(found, layer.base.weight + product, rtol=2**-7, atol=1e-6)
        assert product.abs().max() > 2**-8 * found.abs().max(), name


def test_another_base_or_format_has_another_hash(tmp_path: Path) -> None:
    model = build(tmp_path / "model", "qwen2")
    other = build_tiny_model(tmp_path / "other", "qwen2", tied=True, **DIMS, seed=1)
    hashes = [
        run_ranks(hash_of, 1, *each)[0]
        for each in ((model, "int8"), (model, "fp8"), (other, "int8"))
    ]
    assert len({*hashes}) == 3


def hash_of(model: Path, weight_format: WeightFormat) -> str:
    learner = learner_of(model, {}, Adapters(RANK, ALPHA, weight_format), "float32")
    found: str = learner.base_hash()
    learner.close()
    return found


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """Write a model, and adapters over it."""
    model = build(tmp_path / "model", "qwen2")
    weights = Weights(model, Architecture.from_directory(model))
    tensors = {}
    for layer in range(DIMS["num_hidden_layers"]):
        for kind in ("q_proj", "v_proj"):
            path = f"model.layers.{layer}.self_attn.{kind}"
            out, width = weights.read(f"{path}.weight", ()).shape
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, width)
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, RANK)
    directory = tmp_path / "adapters"
    base = base_hash(model, "int8")
    write_adapters(directory, tensors, alpha=ALPHA, source=model, weight_format="int8", base=base)
    return directory


def test_layers_that_every_block_has_are_named_once(adapters: Path) -> None:
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("use_dora", True, "use_dora is set, and is not supported"),
        ("bias", "all", "bias is 'all', and must be 'none'"),
        ("init_lora_weights", "pissa", "init_lora_weights is 'pissa', and must be True"),
        ("alora_invocation_tokens", [5, 6], "alora_invocation_tokens is set"),
        ("of_a_later_peft", {"a": 1}, "of_a_later_peft is set"),
        ("modules_to_save", ["lm_head"], "modules_to_save is set, and is not supported"),
        ("target_modules", ["q_proj", "up_proj"], "no adapter of up_proj"),
        ("r", "many", "no directory of adapters"),
        ("r", 0, "no directory of adapters: float division by zero"),
        ("r", 8, "r is 8, and .* has rank 4"),
        ("lora_alpha", float("nan"), "lora_alpha=nan over r=4 is no factor"),
    ],
)
def test_adapters_that_are_no_plain_product_are_refused(
    adapters: Path, field: str, value: object, message: str
) -> None:
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=message):
        read_adapters(adapters)


@pytest.mark.parametrize("is_stable", [False, True])
def test_each_layer_of_a_directory_has_its_own_rank_and_alpha(
    is_stable: bool, adapters: Path
) -> None:
    """As peft 0.21 has it: the first pattern that ends a layer's name; rsLoRA divides by a root."""
    tensors = load_file(adapters / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors[f"{first}.lora_A.weight"] = tensors[f"{first}.lora_A.weight"][:2]
    tensors[f"{first}.lora_B.weight"] = tensors[f"{first}.lora_B.weight"][:, :2].contiguous()
    save_file(tensors, adapters / "adapter_model.safetensors")
    file = adapters / "adapter_config.json"
    patterns = {
        "rank_pattern": {r"layers\.0\..*q_proj": 2, "q_proj": RANK},
        "alpha_pattern": {"v_proj": 7},
        "use_rslora": is_stable,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | patterns))
    found = read_adapters(adapters)
    for layer, rank, alpha in (
        ("model.layers.0.self_attn.q_proj", 2, ALPHA),
        ("model.layers.1.self_attn.q_proj", RANK, ALPHA),
        ("model.layers.0.self_attn.v_proj", RANK, 7),
    ):
        a, b = (tensors[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB")
        expected = alpha / (rank**0.5 if is_stable else rank) * b @ a
        product = found.product(f"{layer}.weight")
        assert product is not None
        torch.testing.assert_close(product, expected)


def test_adapters_to_begin_with_fit_the_run_or_are_refused(adapters: Path) -> None:
    model = adapters.parent / "model"
    architecture = Architecture.from_directory(model)
    begins = AdaptersConfig(rank=RANK, alpha=ALPHA, init=str(adapters))
    check_start(Config(adapters=begins), architecture)
    for wrong, message in (
        (
            replace(begins, rank=RANK // 2),
            f"^adapters.init={adapters}: it has rank {RANK}; give adapters.rank={RANK} or more, "
            f"and adapters.alpha={2 * ALPHA:g} for the same factor$",
        ),
        (replace(begins, init="none"), "^none: no directory of adapters"),
        (replace(begins, targets=["q_proj"]), "leaves out 'model.layers.0.self_attn.v_proj'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_start(Config(adapters=wrong), architecture)
    other = build_tiny_model(
        adapters.parent / "other", "qwen2", tied=True, **DIMS | {"head_dim": 64}
    )
    with pytest.raises(ConfigError, match=f"^adapters.init={adapters}: the adapter .* has shape"):
        check_start(Config(adapters=begins), Architecture.from_directory(other))


def test_adapters_are_merged_over_the_base_that_they_were_trained_over_only(
    adapters: Path, tmp_path: Path
) -> None:
    model, found = tmp_path / "model", read_adapters(adapters)
    merge_directory(model, tmp_path / "same", found, "bf16", lambda *_: None, "unbiased")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="trained over another base; give that model, unchanged"):
        merge_directory(model, tmp_path / "changed", found, "bf16", lambda *_: None, "unbiased")
    assert not (tmp_path / "changed").exists()


def test_an_evaluation_serves_adapters_as_a_run_with_its_rounding_exports_them(
    adapters: Path, tmp_path: Path
) -> None:
    model, found = tmp_path / "model", read_adapters(adapters)
    served = {}
    for rounding in get_args(Rounding):
        exported, evaluated = tmp_path / f"{rounding} export", tmp_path / f"{rounding} eval"
        merge_directory(model, exported, found, "int8", lambda *_: None, rounding)
        config = EvalConfig(adapters=str(adapters), format="int8", rounding=rounding)
        assert served_model(config, model, evaluated, []) == evaluated
        served[rounding] = (evaluated / "model.safetensors").read_bytes()
        assert served[rounding] == (exported / "model.safetensors").read_bytes()
    assert served["unbiased"] != served["nearest"]


def test_an_export_that_is_refused_leaves_nothing_and_can_be_repeated(
    adapters: Path, tmp_path: Path
) -> None:
    model, base = tmp_path / "model", read_adapters(adapters).base
    own: Any = SimpleNamespace(targets=["*_proj"], alpha=ALPHA, weight_format="int8")
    tensors = {
        name.removeprefix("base_model.model."): values
        for name, values in load_file(adapters / "adapter_model.safetensors").items()
    }
    places = tmp_path / "merged", tmp_path / "merged_adapters"
    (tmp_path / "merged_adapters.partial").mkdir()  # of one that was killed
    with pytest.raises(ConfigError, match="trained over another base"):
        export._write(tensors, own, "another", model, *places, "unbiased")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "adapters"}
    other = tmp_path / "merged.partial" / "job.json"  # of a killed export of another step
    other.parent.mkdir()
    other.write_text("{}")
    export._write(tensors, own, base, model, *places, "unbiased")
    assert all(place.is_dir() for place in places)
    assert not (places[0] / "job.json").exists()


@pytest.mark.parametrize("content", ["{}", "[]", '{"hash": "0"}', "not JSON"])
def test_a_broken_record_of_the_base_is_refused(adapters: Path, content: str) -> None:
    (adapters / "qurl_base.json").write_text(content)
    with pytest.raises(ConfigError, match="no directory of adapters"):
        read_adapters(adapters)


def test_adapters_of_another_model_are_refused(adapters: Path, tmp_path: Path) -> None:
    found = read_adapters(adapters)
    narrow = DIMS | {"head_dim": DIMS["head_dim"] * 2}
    other = build_tiny_model(tmp_path / "other", "qwen2", tied=True, **narrow)

    def merge(changed: Any) -> None:
        merge_directory(other, tmp_path / "merged", changed, "int8", lambda *_: None, "unbiased")

    with pytest.raises(ConfigError, match=r"q_proj.lora_B.weight' has shape .* and its layer"):
        merge(found)
    renamed = {name.replace("layers.0", "layers.99"): t for name, t in found.tensors.items()}
    with pytest.raises(ConfigError, match=r"layers.99.* is of no linear layer"):
        merge(replace(found, tensors=renamed))
    halved = {name: t[:2] if ".lora_A." in name else t for name, t in found.tensors.items()}
    with pytest.raises(ConfigError, match="lacks A or B, or their ranks differ"):
        check_adapters(
            replace(found, tensors=halved), Architecture.from_directory(tmp_path / "model")
        )
    spoilt = {name: tensor / 0 for name, tensor in found.tensors.items()}
    with pytest.raises(ConfigError, match="holds NaN or infinity"):
        check_adapters(
            replace(found, tensors=spoilt), Architecture.from_directory(tmp_path / "model")
        )
    assert not (tmp_path / "merged").exists()
