"""What a learner measures in one layout, and what transformers and torch give for the same batch.

All dimensions differ (hidden, intermediate, heads x head_dim). The vocabulary needs padding, three
query heads share a key-value head, rows differ in length and do not divide evenly among replicas.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batches import Rows, random_rows, score, scores_of, share_of, with_masks
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.model import weight_map
from qurl_megatron.model.transformers_model import checkpoint_tensors

DIMS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 2,
}
FOUR_LAYERS = {"num_hidden_layers": 4}  # for stages of several layers, or in parts
EXPERTS: dict[str, Any] = {**DIMS, "moe_intermediate_size": 40, "num_experts": 8}
HYBRID: dict[str, Any] = {
    **DIMS,
    **FOUR_LAYERS,  # the last has attention, the others linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
# Rows have up to 13 tokens, so some of their positions are beyond these lengths.
SCALED_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 16,
    },
    "YaRN": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    "YaRN, all fields": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 10,
        "beta_fast": 1.5,
        "beta_slow": 0.1,
        "mscale": 1.4,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
}
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
DP2: dict[str, Any] = {"data_parallel_size": 2}
CP2: dict[str, Any] = {"context_parallel_size": 2}
EP2: dict[str, Any] = {"expert_parallel_size": 2}
ETP2: dict[str, Any] = {"expert_tensor_parallel_size": 2}
VPP2: dict[str, Any] = {**PP2, "virtual_pipeline_parallel_size": 2}
BUDGET: dict[str, Any] = {"tokens_per_micro_batch": 20}
SELECTIVE: dict[str, Any] = {"recompute": "selective"}
FULL: dict[str, Any] = {"recompute": "full"}
ONE_LAYER: dict[str, Any] = {**FULL, "recompute_layers": 1}
OFFLOAD: dict[str, Any] = {"offload_optimizer": True}
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3,
    warmup_steps=2,
    weight_decay=0.1,
    clip_grad=0.5,
    beta2=0.99,
    # The gradient of some key biases is rounding noise, which a small epsilon would amplify.
    epsilon=1e-5,
)
STEPS = 2  # the second is over sampled masks
SCORES = ("proximal_logprobs", "entropy")


def make_rows() -> Rows:
    """Return seven rows of different lengths after prompts of different lengths."""
    return random_rows(7, 13, range(DIMS["vocab_size"]))


# Temperatures, and which tokens are scored with each. Rows share prompts if none is scored in them.
SCORED = {0.7: make_rows().loss_mask, 1.0: torch.ones(7, 13, dtype=torch.bool)}


def make_batch() -> TrainBatch:
    """Return the rows as a batch whose loss is a mean over tokens."""
    rows = make_rows()
    weights = rows.loss_mask / rows.loss_mask.sum()
    return rows.ragged(advantages=rows.advantages, loss_weights=weights)


def make_kept() -> Tensor:
    """Return [rows, time, vocabulary] bool: the tokens that each one was drawn from.

    In every other row they are close to it, so that other ranks have none of them.
    """
    tokens, size = make_rows().tokens, DIMS["vocab_size"]
    kept = torch.rand(*tokens.shape, size, generator=torch.Generator().manual_seed(7)) < 0.1
    kept |= torch.nn.functional.one_hot(tokens, size).bool()
    kept[::2] &= (torch.arange(size) - tokens[::2, :, None]).abs() < 20
    return kept


def policy_gradient(
    current_logprobs: Tensor, entropy: Tensor, batch: Any, loss_weights: Tensor, *_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    moved = torch.zeros(())
    if getattr(batch, "proximal_logprobs", None) is not None:
        moved = (current_logprobs.detach() - batch.proximal_logprobs).abs().sum()
    loss = -(loss_weights * (batch.advantages * current_logprobs + 0.1 * entropy)).sum()
    return loss, {"tokens": batch.loss_mask.sum(), "moved": moved}


def learner_config(layout: dict[str, Any], **fields: Any) -> LearnerConfig:
    return LearnerConfig(**{"dtype": "float32", "micro_batch_size": 3, **layout, **fields})


def of_optimizer(learner: Any, name: str) -> Iterator[tuple[Any, int | None, Tensor]]:
    """Yield rule, layer, and what all replicas have together for each parameter of this rank.

    `name` is `gradient`, `master`, or one of Adam's moments. Collective.
    """
    from megatron.core import parallel_state

    shards = learner._optimizer_shards
    for full_name, rule, layer, parameter in learner._parameters():
        if full_name == "output_layer.weight" and learner.architecture.tie_word_embeddings:
            continue
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if rule.of_experts:
            group = parallel_state.get_expert_data_parallel_group()
        start, stop = shards._range(parameter)
        whole = torch.zeros(parameter.shape)
        if name == "gradient":
            whole.view(-1)[start:stop] = parameter.main_grad.view(-1)[start:stop]
        elif name == "master":
            whole.view(-1)[start:stop] = shards.master(parameter)
        elif start < stop:
            state = shards._part_of[parameter].optimizer.state[shards._updated[parameter]]
            whole.view(-1)[start:stop] = state[name]
        dist.all_reduce(whole, group=group)
        yield rule, layer, whole


def parts_of(learner: Any, weights: Iterable[Any]) -> list[weight_map.TensorPart]:
    """Return the parts of what `Learner.shards` or `of_optimizer` yields; nothing is empty."""
    from qurl_megatron.learner.model import tensor_parallel_place

    return [
        part
        for rule, layer, weight in weights
        if weight.numel()
        for part in weight_map.split(
            rule, weight.clone(), learner.architecture, layer, *tensor_parallel_place(rule)
        )
    ]


@dataclass
class Measurement:
    """Results of one model on one rank."""

    scores: dict[float, tuple[Tensor, ...]]
    first_weights: list[weight_map.TensorPart]
    updates: list[Any]
    gradients: list[weight_map.TensorPart]  # of the first update, clipped
    last_weights: list[weight_map.TensorPart]


def measure(models: dict[str, Path], layout: dict[str, Any]) -> dict[str, Measurement]:
    from qurl_megatron import device

    device.initialize_distributed()  # once for all models; each learner destroys its own groups
    return {name: measure_model(model, layout) for name, model in models.items()}


def measure_model(model: Path, layout: dict[str, Any]) -> Measurement:
    from qurl_megatron.learner.learner import Learner

    # Two micro batches, of which the second is smaller, unless the layout divides the rows.
    learner = Learner(model, learner_config(layout, micro_batch_size=4), OPTIMIZER)
    first_weights = parts_of(learner, learner.shards())
    batch, rows = make_batch(), make_rows()
    kept = make_kept()[torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]]
    shares = [share_of(learner, each) for each in (batch, with_masks(batch, kept))]
    for share in shares:
        learner.score(share, SCORES, temperature=0.7)
    scores = {0.7: scores_of(shares[0], SCORES), 1.0: score(learner, rows.tokens)}
    updates: list[Any] = []
    first_gradients: list[weight_map.TensorPart] = []
    for each in shares:
        updates.append(learner.update(each, policy_gradient, temperature=0.7))
        first_gradients = first_gradients or parts_of(learner, of_optimizer(learner, "gradient"))
    last_weights = parts_of(learner, learner.shards())
    measurement = Measurement(scores, first_weights, updates, first_gradients, last_weights)
    learner.close()
    return measurement


@dataclass
class Reference:
    """Results of one model from transformers and torch."""

    scores: dict[float, tuple[Tensor, ...]]
    losses: list[float]
    grad_norms: list[float]
    first_weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the first step, clipped
    last_weights: dict[str, Tensor]


def logprobs_and_entropy_of(
    model: Any, tokens: Tensor, temperature: float, kept: Tensor | None = None
) -> tuple[Tensor, ...]:
    logits = model(tokens).logits[:, :-1] / temperature
    if kept is not None:
        logits = logits.masked_fill(~kept[:, 1:], -1e9)  # of a probability of 0
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(2, tokens[:, 1:, None]).squeeze(2)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return tuple(torch.nn.functional.pad(scores, (1, 0)) for scores in (logprobs, entropy))


def make_reference(directory: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = make_rows()
    weights = rows.loss_mask / rows.loss_mask.sum()
    with torch.no_grad():
        scores = {
            t: tuple(s * mask for s in logprobs_and_entropy_of(model, rows.tokens, t))
            for t, mask in SCORED.items()
        }
    first_weights = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model)}
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
    )
    losses, norms, first_gradients = [], [], {}
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.learning_rate * min(1.0, step / OPTIMIZER.warmup_steps)
        optimizer.zero_grad()
        kept = make_kept() if step == STEPS else None
        logprobs, entropy = logprobs_and_entropy_of(model, rows.tokens, 0.7, kept)
        loss, _ = policy_gradient(logprobs, entropy, rows, weights)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_grad)))
        losses.append(float(loss.detach()))
        if step == 1:
            of = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            names: Any = SimpleNamespace(named_parameters=of.items, config=model.config)
            first_gradients = dict(checkpoint_tensors(names))
        optimizer.step()
    last_weights = {name: tensor.detach() for name, tensor in checkpoint_tensors(model)}
    return Reference(scores, losses, norms, first_weights, first_gradients, last_weights)


def assert_scores_match(
    measurement: Measurement, reference: Reference, tolerance: float = 1e-5
) -> None:
    for temperature, (logprobs, entropy) in measurement.scores.items():
        expected = reference.scores[temperature]
        assert logprobs.dtype == entropy.dtype == torch.float32
        torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=tolerance)
        torch.testing.assert_close(entropy, expected[1], rtol=0, atol=tolerance)


def gathered(parts_by_rank: list[list[weight_map.TensorPart]]) -> dict[str, Tensor]:
    """Assemble full tensors from every rank's parts; fail if one is missing or replicas differ."""
    by_name: dict[str, list[weight_map.TensorPart]] = {}
    for part in (part for parts in parts_by_rank for part in parts):
        by_name.setdefault(part.name, []).append(part)
    tensors = {}
    for name, parts in by_name.items():
        runs: dict[tuple[int, int], Tensor] = {}
        for part in parts:
            if not part.view.numel():
                continue  # a rank may hold no rows of a key-value head
            assert torch.equal(runs.setdefault(part.offset, part.tensor), part.tensor)
        dim = parts[0].dim
        ordered = [runs[offset] for offset in sorted(runs)]
        tensors[name] = ordered[0] if dim is None else torch.cat(ordered, dim)
        assert tensors[name].shape == parts[0].full_shape
    return tensors
