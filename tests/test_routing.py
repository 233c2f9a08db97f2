"""The learner compares an engine's experts with its own, or takes them, in all layouts.

The reference is transformers' model, whose routers are made to choose the same experts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import padded, ragged, share_of
from distributed import run_ranks
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from tiny import build_tiny_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank, computed again": {"recompute": "full"},
    "TP2xDP2, EP2": {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "expert_parallel_size": 2,
    },
    "PP2xCP2": {"pipeline_parallel_size": 2, "context_parallel_size": 2},
}
ROWS, TIME, LAYERS, EXPERTS, TOP_K = 4, 12, 2, 8, 2


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, 90, (ROWS, TIME), generator=generator)


def experts_of_an_engine() -> Tensor:
    """Return experts [rows, time, layers, top_k] that no router would choose; some unknown."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.rand(ROWS, TIME, LAYERS, EXPERTS, generator=generator)
    experts = scores.topk(TOP_K).indices.to(torch.int16)
    experts[1, 4] = -1
    return experts


def reference(model: Path, experts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return transformers' log-probs [rows, time - 1], and its own choices, like `experts`."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    own = torch.zeros(ROWS, TIME, LAYERS, TOP_K, dtype=torch.int16)

    def choose(layer: int, gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, scores, chosen = type(gate).forward(gate, hidden)
            own[:, :, layer] = chosen.view(ROWS, TIME, TOP_K)
            if experts is not None:
                given = experts[:, :, layer].reshape(-1, TOP_K).long()
                chosen = torch.where(given >= 0, given, chosen)
                scores = logits.float().gather(1, chosen).softmax(-1)
            return logits, scores, chosen

        return forward

    for number, layer in enumerate(network.model.layers):
        layer.mlp.gate.forward = choose(number, layer.mlp.gate)
    with torch.no_grad():
        logits = network(tokens()).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, tokens()[:, 1:, None])[..., 0], own


def measure(model: Path, layout: dict[str, Any], own: Tensor) -> dict[str, Any]:
    """Return log-probs and counts: with the learner's own choices, and with an engine's."""
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    results: dict[str, Any] = {}
    for name, recorded, replays in (
        ("own", own, True),
        ("compared", experts_of_an_engine(), False),
        ("replayed", experts_of_an_engine(), True),
    ):
        learner = Learner(
            model,
            LearnerConfig(**{"dtype": "float32", "micro_batch_size": 2, **layout}),
            OptimizerConfig(),
            replays_routing=replays,
        )
        batch = ragged(tokens(), routed_experts=recorded)
        batch.loss_weights = torch.full(batch.tokens.shape, 1e-3)
        share = share_of(learner, batch)
        learner.score(share, ["proximal_logprobs"], temperature=1.0)
        scores = share.collect("proximal_logprobs")

        def loss(logprobs: Tensor, entropy: Tensor, rows: Any, weights: Tensor, _: Any) -> Any:
            return (logprobs * weights).sum(), {}

        stats = learner.update(share, loss, temperature=1.0).stats
        changed, known = stats["routing_changed"], stats["routing_known"]
        results[name] = padded(scores)[:, 1:] if scores else None, changed / known, known
        learner.close()
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("routing"), "qwen3_moe")


@pytest.mark.parametrize("name", LAYOUTS)
def test_replayed_experts_are_those_that_the_engine_chose(model: Path, name: str) -> None:
    layout = LAYOUTS[name]
    free, own = reference(model, None)
    forced, _ = reference(model, experts_of_an_engine())
    assert (forced - free).abs().max() > 0.1
    ranks = run_ranks(measure, LearnerConfig(**layout).world_size, model, layout, own)
    results = ranks[0]
    for name, expected in (("own", free), ("compared", free), ("replayed", forced)):
        torch.testing.assert_close(results[name][0], expected, rtol=0, atol=2e-5, msg=name)
    assert results["own"][1] == 0
    # Two random experts are the chosen ones for one token in 28.
    assert 0.9 < results["compared"][1] < 1
    passes = 2 if "recompute" in layout else 1
    inputs = ROWS * (TIME - 1)  # the last token of a row is no input
    assert results["own"][2] == passes * inputs * LAYERS
    assert results["compared"][2] == results["replayed"][2] == passes * (inputs - 1) * LAYERS
    assert all(rank[key][1:] == results[key][1:] for rank in ranks for key in results)
