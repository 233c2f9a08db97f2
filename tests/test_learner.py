"""The learner against transformers and torch, on every layout, in real processes over gloo.

All sizes differ (hidden, intermediate, heads x head_dim), the vocabulary needs padding, three query
heads share a key-value head, rows have different lengths and do not divide among copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from tiny import build_tiny_model

DIMS = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 4,
}
MODELS = [
    f"{family}-{tied}" for family in ("qwen2", "qwen3", "llama") for tied in ("tied", "untied")
]
LAYOUTS = {  # tensor, pipeline, data and virtual pipeline parallel sizes, layers in the last stage
    "TP1": (1, 1, 1),
    "TP2": (2, 1, 1),
    "PP2": (1, 2, 1),
    "DP2": (1, 1, 2),
    "TP2xPP2": (2, 2, 1),
    "PP2 in 2 parts": (1, 2, 1, 2),
    "PP2 of 3 and 1": (1, 2, 1, 1, 1),
}
TEMPERATURES = (0.7, 1.0)
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3,
    warmup_steps=2,
    weight_decay=0.1,
    clip_grad=0.5,
    beta2=0.99,
    epsilon=1e-5,  # some key biases have a gradient of 0 but for rounding, which Adam would blow up
)
STEPS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        name: build_tiny_model(
            directory / name, name.split("-")[0], tied=name.endswith("-tied"), **DIMS
        )
        for name in MODELS
    }


def make_batch() -> tuple[TrainBatch, Tensor]:
    """Seven rows of different lengths with prompts of different lengths, and their weights."""
    generator = torch.Generator().manual_seed(1)
    shape = (7, 13)
    time = torch.arange(shape[1])
    prompt = torch.randint(1, 5, (shape[0], 1), generator=generator)
    length = torch.randint(6, shape[1] + 1, (shape[0], 1), generator=generator)
    batch = TrainBatch(
        tokens=torch.randint(0, DIMS["vocab_size"], shape, generator=generator),
        loss_mask=(time >= prompt) & (time < length),
        behaviour_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape),
        advantages=torch.randn(shape, generator=generator),
    )
    return batch, batch.loss_mask / batch.loss_mask.sum()


def policy_gradient(
    current_logprobs: Tensor, entropy: Tensor, batch: TrainBatch, loss_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    moved = torch.zeros(())
    if batch.proximal_logprobs is not None:
        moved = (current_logprobs.detach() - batch.proximal_logprobs).abs().sum()
    loss = -(loss_weights * batch.advantages * current_logprobs).sum()
    return loss, {"tokens": batch.loss_mask.sum(), "moved": moved}


def learner_config(layout: tuple[int, ...], **fields: Any) -> LearnerConfig:
    fields = {"dtype": "float32", "micro_batch_size": 2, **fields}
    return LearnerConfig(*layout, **fields)


def weights_of(learner: Any) -> list[weight_map.TensorPart]:
    from megatron.core import parallel_state

    return [
        part
        for rule, layer, shard in learner.shards()
        for part in weight_map.split(
            rule,
            shard.clone(),
            learner.architecture,
            layer,
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
    ]


# What one rank measures of one model; the same calls on every rank.
@dataclass
class Measured:
    scores: dict[float, tuple[Tensor, Tensor]]
    first_weights: list[weight_map.TensorPart]
    updates: list[Any]
    last_weights: list[weight_map.TensorPart]


def measure(models: dict[str, Path], layout: tuple[int, ...]) -> dict[str, Measured]:
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()  # one world for all; each learner cleans up its own groups
    return {name: measure_one(Learner, model, layout) for name, model in models.items()}


def measure_one(
    learner_class: Any, model: Path, layout: tuple[int, ...], **fields: Any
) -> Measured:
    learner = learner_class(model, learner_config(layout, **fields), OPTIMIZER)
    batch, loss_weights = make_batch()
    scores = {
        temperature: learner.logprobs_and_entropy(batch.tokens, temperature=temperature)
        for temperature in TEMPERATURES
    }
    first_weights = weights_of(learner)
    batch.proximal_logprobs, _ = learner.logprobs_and_entropy(
        batch.tokens, temperature=0.7, loss_mask=batch.loss_mask
    )
    updates = [
        learner.update(batch, loss_weights, policy_gradient, temperature=0.7) for _ in range(STEPS)
    ]
    measured = Measured(scores, first_weights, updates, weights_of(learner))
    learner.close()
    return measured


@pytest.fixture(scope="module", params=LAYOUTS)
def by_rank(request, models) -> list[dict[str, Measured]]:
    """Every model's measurements on every rank of one layout."""
    layout = LAYOUTS[request.param]
    return run_ranks(measure, layout[0] * layout[1] * layout[2], models, layout)


# The same, in plain transformers and torch.
@dataclass
class Reference:
    scores: dict[float, tuple[Tensor, Tensor]]
    losses: list[float]
    grad_norms: list[float]
    first_weights: dict[str, Tensor]
    last_weights: dict[str, Tensor]


def logprobs_and_entropy_of(model: Any, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
    distribution = (model(tokens).logits[:, :-1] / temperature).log_softmax(-1)
    logprobs = distribution.gather(2, tokens[:, 1:, None]).squeeze(2)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return tuple(torch.nn.functional.pad(scores, (1, 0)) for scores in (logprobs, entropy))


@pytest.fixture(scope="module")
def references(models) -> dict[str, Reference]:
    return {name: make_reference(model) for name, model in models.items()}


def make_reference(directory: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch, loss_weights = make_batch()
    with torch.no_grad():
        scores = {t: logprobs_and_entropy_of(model, batch.tokens, t) for t in TEMPERATURES}
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
    )
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.learning_rate * min(1.0, step / OPTIMIZER.warmup_steps)
        optimizer.zero_grad()
        logprobs, entropy = logprobs_and_entropy_of(model, batch.tokens, 0.7)
        loss, _ = policy_gradient(logprobs, entropy, batch, loss_weights)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_grad)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return Reference(scores, losses, norms, first, model.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_entropy_are_those_of_transformers(by_rank, references, name):
    for rank in by_rank:
        for temperature, (logprobs, entropy) in rank[name].scores.items():
            expected = references[name].scores[temperature]
            assert logprobs.dtype == entropy.dtype == torch.float32
            torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_the_same_result(by_rank, name):
    first = by_rank[0][name]
    for rank in by_rank[1:]:
        assert rank[name].updates == first.updates
        for temperature in TEMPERATURES:
            for mine, theirs in zip(
                rank[name].scores[temperature], first.scores[temperature], strict=True
            ):
                assert torch.equal(mine, theirs)


def gathered(parts_by_rank: list[list[weight_map.TensorPart]]) -> dict[str, Tensor]:
    """Full tensors out of every rank's parts; no part may be missing or disagree with a copy."""
    by_name: dict[str, list[weight_map.TensorPart]] = {}
    for part in (part for parts in parts_by_rank for part in parts):
        by_name.setdefault(part.name, []).append(part)
    tensors = {}
    for name, parts in by_name.items():
        runs: dict[tuple[int, int], Tensor] = {}
        for part in parts:
            if not part.view.numel():
                continue  # a rank may have nothing of a key-value head
            assert torch.equal(runs.setdefault(part.offset, part.tensor), part.tensor)
        dim = parts[0].dim
        ordered = [runs[offset] for offset in sorted(runs)]
        tensors[name] = ordered[0] if dim is None else torch.cat(ordered, dim)
        assert tensors[name].shape == parts[0].full_shape
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_all_ranks_are_the_checkpoint_bit_for_bit(by_rank, references, models, name):
    tensors = gathered([rank[name].first_weights for rank in by_rank])
    names = weight_map.hugging_face_names(Architecture.from_directory(models[name]))
    assert tensors.keys() == names
    for tensor_name, tensor in tensors.items():
        assert torch.equal(tensor, references[name].first_weights[tensor_name]), tensor_name


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_yields_each_tensor_once(by_rank, name):
    for rank in by_rank:
        names = [part.name for part in rank[name].first_weights]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", MODELS)
def test_optimizer_steps_are_those_of_torch(by_rank, references, name):
    reference = references[name]
    updates = by_rank[0][name].updates
    assert [u.learning_rate for u in updates] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert [u.loss for u in updates] == pytest.approx(reference.losses, abs=1e-5)
    assert [u.grad_norm for u in updates] == pytest.approx(reference.grad_norms, rel=1e-4)
    assert all(norm > OPTIMIZER.clip_grad for norm in reference.grad_norms)  # clipping happened
    tensors = gathered([rank[name].last_weights for rank in by_rank])
    for tensor_name, tensor in tensors.items():
        before, after = (
            weights[tensor_name] for weights in (reference.first_weights, reference.last_weights)
        )
        assert (after - before).abs().max() > 1e-4, tensor_name  # else nothing is shown
        torch.testing.assert_close(tensor, after, rtol=0, atol=1e-5, msg=tensor_name)


def test_ranks_may_share_a_key_value_head(tmp_path):
    """Two key-value heads on four ranks: the fused QKV is cut within its groups."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    models = {
        family: build_tiny_model(tmp_path / family, family, **DIMS | heads)
        for family in ("qwen2", "qwen3")
    }
    by_rank = run_ranks(measure, 4, models, (4, 1, 1))
    for family, model in models.items():
        reference = make_reference(model)
        for temperature, expected in reference.scores.items():
            logprobs, entropy = by_rank[0][family].scores[temperature]
            torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-5)
        tensors = gathered([rank[family].last_weights for rank in by_rank])
        assert tensors.keys() == weight_map.hugging_face_names(Architecture.from_directory(model))
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, reference.last_weights[name], rtol=0, atol=1e-5, msg=name
            )


@pytest.mark.parametrize("name", MODELS)
def test_current_equals_proximal_before_the_first_update_and_not_after(by_rank, name):
    first, second, _ = by_rank[0][name].updates
    assert first.stats == {"tokens": int(make_batch()[0].loss_mask.sum()), "moved": 0.0}
    assert second.stats["moved"] > 1e-3


def kept_and_recomputed(model: Path, layout: tuple[int, ...]) -> list[Measured]:
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    return [
        measure_one(Learner, model, layout, recompute_activations=recompute)
        for recompute in (False, True)
    ]


@pytest.mark.parametrize("layout", [(2, 2), (1, 2, 1, 2)], ids=["TP2xPP2", "VPP"])
def test_recomputed_activations_are_those_that_were_not_kept(layout, models):
    """Bit for bit, in every update and weight; `test_memory` shows that they are not kept."""
    for kept, recomputed in run_ranks(
        kept_and_recomputed, layout[0] * layout[1], models["qwen3-untied"], layout
    ):
        assert recomputed.updates == kept.updates
        for mine, theirs in zip(recomputed.last_weights, kept.last_weights, strict=True):
            assert torch.equal(mine.tensor, theirs.tensor), mine.name


def first_updates(model: Path, layout: tuple[int, ...], rows: int, sizes: list[int]) -> Any:
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    updates = []
    for size in sizes:
        learner = Learner(model, learner_config(layout, micro_batch_size=size), OPTIMIZER)
        batch, loss_weights = make_batch()
        updates.append(
            learner.update(
                batch.rows(slice(rows)), loss_weights[:rows], policy_gradient, temperature=1.0
            )
        )
        learner.close()
    return updates


@pytest.mark.parametrize("rows", [7, 1], ids=["seven rows", "fewer rows than copies"])
def test_gradients_depend_on_neither_micro_batches_nor_copies(models, rows):
    model = models["qwen2-tied"]
    alone = run_ranks(first_updates, 1, model, (1, 1, 1), rows, [7, 2, 1])[0]
    copies = run_ranks(first_updates, 2, model, (1, 1, 2), rows, [4, 1])[0]
    for update in [*alone, *copies]:
        assert update.loss == pytest.approx(alone[0].loss, rel=1e-6)
        assert update.grad_norm == pytest.approx(alone[0].grad_norm, rel=1e-6)
        assert update.stats == alone[0].stats


def bfloat16_masters(model: Path, layout: tuple[int, ...]) -> dict[str, Any]:
    from qurl_megatron.learner.learner import Learner

    def a_third(name: str, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.float32
        return tensor / 3 if name.endswith("_proj.weight") else tensor

    learner = Learner(
        model,
        learner_config(layout, dtype="bfloat16"),
        OptimizerConfig(learning_rate=1e-6),
        transform=a_third,
    )
    batch, loss_weights = make_batch()
    logprobs, entropy = learner.logprobs_and_entropy(batch.tokens, temperature=1.0)
    masters = {
        n: learner._master(p).clone() for n, p in learner.chunks[0].module.named_parameters()
    }
    compute = {n: p.detach().clone() for n, p in learner.chunks[0].module.named_parameters()}
    update = learner.update(batch, loss_weights, policy_gradient, temperature=1.0)
    learner.reset_optimizer(OptimizerConfig(learning_rate=1e-6))
    moved = {
        n: learner._master(p) - masters[n] for n, p in learner.chunks[0].module.named_parameters()
    }
    learner.close()
    return {
        "logprobs": logprobs,
        "grad_norm": update.grad_norm,
        "master": masters["decoder.layers.0.mlp.linear_fc2.weight"],
        "compute": compute["decoder.layers.0.mlp.linear_fc2.weight"],
        "moved": {name: float(tensor.abs().max()) for name, tensor in moved.items()},
    }


@pytest.mark.parametrize("layout", ["TP1", "TP2xPP2"])
def test_bfloat16_computes_with_rounded_weights_and_keeps_unrounded_masters(
    models, references, layout
):
    world_size = torch.Size(LAYOUTS[layout]).numel()
    first, *_ = run_ranks(bfloat16_masters, world_size, models["qwen3-tied"], LAYOUTS[layout])
    stored = references["qwen3-tied"].first_weights["model.layers.0.mlp.down_proj.weight"]
    expected = stored[:, : first["master"].shape[1]] / 3
    assert torch.equal(first["master"], expected)
    assert torch.equal(first["compute"], expected.bfloat16())
    assert not torch.equal(first["compute"].float(), expected)
    # Far below bfloat16's resolution, yet it is kept, also when the optimizer starts over.
    assert all(5e-7 < moved < 2e-6 for moved in first["moved"].values()), first["moved"]
    assert first["logprobs"][:, 1:].max() < 0 and 0 < first["grad_norm"] < 100


def bfloat16_logprobs(model: Path) -> Tensor:
    from qurl_megatron.learner.learner import Learner

    learner = Learner(model, learner_config((1, 1, 1), dtype="bfloat16"), OPTIMIZER)
    logprobs, _ = learner.logprobs_and_entropy(make_batch()[0].tokens, temperature=1.0)
    learner.close()
    return logprobs


def test_bfloat16_logprobs_differ_from_float32_by_rounding_only(models, references):
    (logprobs,) = run_ranks(bfloat16_logprobs, 1, models["qwen2-untied"])
    difference = (logprobs - references["qwen2-untied"].scores[1.0][0]).abs()
    assert 1e-4 < difference.mean() < 3e-2


def scaled_rope(model: Path) -> Tensor:
    from qurl_megatron.learner.learner import Learner

    learner = Learner(model, learner_config((1, 1, 1)), OPTIMIZER)
    logprobs, _ = learner.logprobs_and_entropy(make_batch()[0].tokens, temperature=1.0)
    learner.close()
    assert not torch.distributed.is_initialized()  # the learner made this world
    return logprobs


def test_llama3_rope_scaling_is_that_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    rope = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 16,
    }
    model = build_tiny_model(tmp_path / "scaled", "llama", rope_parameters=rope, **DIMS)
    plain = {"rope_type": "default", "rope_theta": 100.0}
    unscaled = build_tiny_model(tmp_path / "plain", "llama", rope_parameters=plain, **DIMS)
    tokens = make_batch()[0].tokens
    (logprobs,) = run_ranks(scaled_rope, 1, model)
    with torch.no_grad():
        expected, other = (
            logprobs_and_entropy_of(
                AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), tokens, 1.0
            )[0]
            for directory in (model, unscaled)
        )
    assert (expected - other).abs().max() > 1e-2
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def life_of_a_learner(model: Path) -> dict[str, Any]:
    import torch.distributed as dist

    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    seen: dict[str, Any] = {}
    with pytest.raises(ValueError) as refusal:
        Learner(model, learner_config((1, 1, 2)), OPTIMIZER)
    seen["refusal"] = str(refusal.value)

    learner = Learner(model, learner_config((1, 1, 1)), OPTIMIZER)
    batch, loss_weights = make_batch()
    score = lambda: learner.logprobs_and_entropy(batch.tokens, temperature=1.0)[0]  # noqa: E731
    step = lambda: learner.update(batch, loss_weights, policy_gradient, temperature=1.0)  # noqa: E731
    step()
    before = score()
    learner.reset_optimizer(OptimizerConfig(learning_rate=3e-5))
    seen["unmoved"] = torch.equal(score(), before)
    seen["learning_rates"] = [step().learning_rate for _ in range(2)]
    with pytest.raises(FloatingPointError) as spoilt:
        learner.update(batch, loss_weights * torch.nan, policy_gradient, temperature=1.0)
    seen["spoilt"] = str(spoilt.value)
    learner.close()
    seen["world_stands"] = dist.is_initialized()
    dist.destroy_process_group()
    return seen


def test_a_learner_in_a_world_of_the_callers(models):
    (seen,) = run_ranks(life_of_a_learner, 1, models["llama-tied"])
    assert "start 2 ranks" in seen["refusal"] and "\n" not in seen["refusal"]
    assert seen["unmoved"]
    assert seen["learning_rates"] == [3e-5, 3e-5]
    assert "nan" in seen["spoilt"]
    assert seen["world_stands"]


def score_shared_vocabulary(chunk_elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """This rank's results and gradients, and the size of the largest tensor made on the way."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from qurl_megatron import device
    from qurl_megatron.learner.logprobs import logprobs_and_entropy

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    device.initialize_distributed()
    hidden, weight, targets, grad = vocabulary_problem(dtype)
    rows = -(-len(weight) // dist.get_world_size())
    start = rows * dist.get_rank()
    hidden, mine = hidden.requires_grad_(), weight[start : start + rows].clone().requires_grad_()
    with Largest() as largest:
        logprobs, entropy = logprobs_and_entropy(
            hidden,
            mine,
            targets,
            temperature=0.7,
            first_row=start,
            group=dist.group.WORLD,
            chunk_elements=chunk_elements,
        )
        logprobs.backward(grad)
    dist.destroy_process_group()
    return logprobs.detach(), entropy, hidden.grad, mine.grad, largest.elements


def vocabulary_problem(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(96, 8, generator=generator)
    weight = 2 * torch.randn(513, 8, generator=generator)
    targets = torch.randint(0, 513, (96,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(96, generator=generator)


def exact_scores(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same in float64, with torch's own log_softmax and autograd."""
    hidden, weight, targets, grad = vocabulary_problem(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    distribution = (hidden @ weight.t() / 0.7).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None]).squeeze(1)
    logprobs.backward(grad.double())
    entropy = -(distribution.exp() * distribution).sum(-1)
    assert hidden.grad is not None and weight.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("chunk_elements", [1, 4096, 10**6], ids=["one token", "some", "all"])
def test_scores_of_a_shared_vocabulary_are_exact(world_size, chunk_elements):
    ranks = run_ranks(score_shared_vocabulary, world_size, chunk_elements, torch.float32)
    logprobs, entropy, grad_hidden, grad_weight = exact_scores(torch.float32)
    for rank in ranks:
        for result, expected in zip(rank[:3], (logprobs, entropy, grad_hidden), strict=True):
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    result = torch.cat([rank[3] for rank in ranks])
    torch.testing.assert_close(result.double(), grad_weight, rtol=1e-5, atol=1e-5)


def test_scores_never_hold_all_logits():
    (*_, chunked), (*_, whole) = (
        run_ranks(score_shared_vocabulary, 1, elements, torch.float32)[0]
        for elements in (4096, 10**6)
    )
    assert whole >= 96 * 513
    assert chunked <= 513 * 8  # the largest is the weight's gradient


def test_bfloat16_gradients_do_not_lose_small_chunks():
    hidden, entropy, grad_hidden, grad_weight = exact_scores(torch.bfloat16)
    errors = []
    for elements in (1, 10**6):
        (rank,) = run_ranks(score_shared_vocabulary, 1, elements, torch.bfloat16)
        errors.append(float((rank[3].double() - grad_weight).norm() / grad_weight.norm()))
    assert all(1e-4 < error < 1e-2 for error in errors), errors


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((3, 1, 1), "2 key-value heads"),
        ((1, 3, 1), "4 layers"),
        ((2, 1, 1), "start 2 ranks"),
        ((1, 1, 1, 2), "leave it at 1"),
        ((1, 2, 1, 3), "virtual_pipeline_parallel_size=3 does not divide a stage's 2 layers"),
        ((1, 3, 1, 1, 3), "leaves 1 layers"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(models, layout, words):
    (message,) = run_ranks(refusal_of, 1, models["qwen3-untied"], layout)
    assert words in message and "\n" not in message


def refusal_of(model: Path, layout: tuple[int, ...]) -> str:
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.model.architecture import ArchitectureError

    with pytest.raises(ArchitectureError) as refusal:
        Learner(model, learner_config(layout), OPTIMIZER)
    return str(refusal.value)


def score_with_a_reference(model_dir: Path, layout: tuple[int, ...]) -> list[Tensor]:
    """Log-probs before an update, then of the reference, then of the updated policy, twice."""
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.loop.warmup import negative_log_likelihood

    learner = Learner(model_dir, LearnerConfig(*layout), OptimizerConfig(learning_rate=1e-2))
    learner.keep_reference()
    tokens = torch.arange(3, 43).view(2, 20)

    def scores() -> Tensor:
        return learner.logprobs_and_entropy(tokens, temperature=1.0)[0]

    before = scores()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    nothing = torch.zeros(tokens.shape)
    batch = TrainBatch(tokens, mask, nothing, nothing, nothing)
    learner.update(batch, mask / mask.sum(), negative_log_likelihood, temperature=1.0)
    updated = scores()
    with learner.as_reference():
        reference = scores()
    results = [before, reference, updated, scores()]
    learner.close()
    return results


@pytest.mark.parametrize("layout", [(2,), (1, 2)], ids=["TP2", "PP2 tied"])
def test_the_reference_stays_what_the_policy_was(layout: tuple[int, ...], tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "qwen2", tied=True)
    results, *_ = run_ranks(score_with_a_reference, 2, tmp_path, layout)
    before, reference, updated, again = results
    assert torch.equal(reference, before)
    assert torch.equal(again, updated)
    assert (updated - before).abs().max() > 0.01
