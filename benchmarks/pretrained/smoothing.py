"""How far is a served copy from the model, with smoothing and without it?

An arm may leave activations exact (`what`), or have UAQ of another scale than the recipe's.

The learner computes as a server does, on answers that the model gave: KL(served || exact) of the
next token over the whole vocabulary, in nats, and the largest ratio of a sampled token's
probabilities. No server runs.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.config.schema import (
    LearnerConfig,
    OptimizerConfig,
    QuantizedForward,
    ServerConfig,
    UaqConfig,
)
from qurl_megatron.data.problems import read_problems
from qurl_megatron.data.prompts import tokenize
from qurl_megatron.extensions.mismatch.mismatch import divergence
from qurl_megatron.learner.learner import Learner
from qurl_megatron.learner.model import PolicyModel
from qurl_megatron.learner.quantized_forward import Served
from qurl_megatron.model.tokenizer import load_tokenizer
from qurl_megatron.quantization import uaq
from qurl_megatron.recipes import smollm2
from qurl_megatron.weight_sync.reshard import Converter

ANSWERED, LENGTH = 32, 24  # prompts, and the longest answer
FORMATS = ("int8", "fp8", "int4-g32")
EXPONENTS = (0, 0.4, 0.5, 0.6)


def _arm(
    weight_format: str, exponent: float, *, keep: str = "", seen: int = 8, **others: Any
) -> dict[str, Any]:
    """Return an arm; smoothing sees so many prompts."""
    return {"format": weight_format, "exponent": exponent, "keep": keep, "prompts": seen} | others


ARMS: list[dict[str, Any]] = [
    *(_arm(weight_format, exponent) for weight_format in FORMATS for exponent in EXPONENTS),
    *(_arm("int8", exponent, keep="*.down_proj") for exponent in (0, 0.5)),
    _arm("int8", 0.5, seen=64),
    *(_arm(weight_format, 0, what="weights") for weight_format in ("int8", "fp8")),
    *(_arm(weight_format, 0, scale=1) for weight_format in FORMATS),
    _arm("int8", 0.5, scale=1),
]
UAQ = 1.5  # of all other arms


class _WholeDistribution(PolicyModel):
    """A policy whose score of a token is the log-probs of all tokens, [1, scored, vocabulary]."""

    def score(  # type: ignore[override]
        self, hidden: Tensor, rows: TrainBatch, scored: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        logits = hidden[scored, 0] @ self.shared_embedding_or_output_weight().t()
        return (logits.log_softmax(-1)[None],)


def measure(
    model: Path,
    format: Any,
    exponent: float,
    keep: str,
    prompts: int,
    what: QuantizedForward = "all",
    scale: float = UAQ,
) -> dict[str, Any]:
    """Return the KL, its median and the largest ratio, over all tokens of the answers."""
    learner = learner_of(model, scale)
    outlier = smooth(model, learner, exponent, prompts)
    converter = Converter(learner, format, 2**26, keep=[keep] if keep else [])
    row = distance(model, learner, converter, what)
    print(format, exponent, keep, prompts, what, scale, f"{row['kl']:.2e}", flush=True)
    return row | {"outlier": outlier}


def smooth(model: Path, learner: Learner, exponent: float, prompts: int = 8) -> str:
    """Let the learner smooth what it sends; return by how much the worst outlier stands out."""
    _, others = asked(model)
    learner.smoothing = None
    if not exponent:
        return ""
    seen = learner.share(pack([_unanswered(each) for each in others[:prompts]]).only())
    largest = learner.smooth(seen, exponent)
    return f"{largest.ratio:.0f} in {largest.name}"


def distance(
    model: Path, learner: Learner, served: Served, what: QuantizedForward = "all"
) -> dict[str, Any]:
    """Return how far a served copy is from the learner, over all tokens of the answers."""
    answers, _ = asked(model)
    share = learner.share(pack(answers).only())
    exact = scored(learner, share)
    with learner.as_served(served, ServerConfig(), what):
        copied = scored(learner, share)
    kl = divergence(copied, exact)
    sampled = torch.tensor([t for group in answers for t in group.completions[0].token_ids])
    ratio = (copied - exact).gather(1, sampled[:, None]).abs().max().exp()
    return {
        "tokens": len(kl),
        "kl": float(kl.mean()),
        "kl_error": float(kl.std() / len(kl) ** 0.5),
        "kl_median": float(kl.median()),
        "largest_ratio": float(ratio),
    }


@functools.cache
def asked(model: Path, answered: int = ANSWERED) -> tuple[list[RolloutGroup], list[Prompt]]:
    """Return answers to the first prompts of the recipe, and prompts that no arm answers."""
    from transformers import AutoModelForCausalLM

    config = smollm2.recipe()
    tokenizer = load_tokenizer(model)
    problems = read_problems(config.data, config.prompts.options, seed=config.seed)
    read = tokenize(problems, tokenizer, config.rollout.max_prompt_length)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    groups = []
    for prompt in read[:answered]:
        given = torch.tensor([prompt.token_ids])
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        row = policy.generate(given, max_new_tokens=LENGTH, eos_token_id=end, **settings)[0]
        groups.append(_answered(prompt, row[given.shape[1] :].tolist()))
    return groups, read[ANSWERED:]


def learner_of(model: Path, scale: float = UAQ) -> Learner:
    """Return the learner with UAQ of this scale, and close one with another."""
    for other in [each for each in _learners if each != scale]:
        _learners.pop(other).close()
    if scale not in _learners:
        transform = uaq.transform(UaqConfig(scale), is_hybrid=False)
        layout = LearnerConfig(dtype="float32", threads_per_rank=torch.get_num_threads())
        _learners[scale] = Learner(
            model, layout, OptimizerConfig(), transform=transform, model=_WholeDistribution
        )
    return _learners[scale]


_learners: dict[float, Learner] = {}  # by UAQ's scale; one exists at a time


def _answered(prompt: Prompt, token_ids: list[int]) -> RolloutGroup:
    zeros = [0] * len(token_ids)
    answer = Completion(
        token_ids, [0.0] * len(token_ids), "", truncated=False, token_versions=zeros
    )
    return RolloutGroup(prompt, [answer], [0.0])


def _unanswered(prompt: Prompt) -> RolloutGroup:
    return _answered(prompt, [0])


def scored(learner: Learner, share: Any) -> Tensor:
    """Return the log-probs of all tokens at each sampled one: [sampled, vocabulary]."""
    learner.score(share, ["proximal_logprobs"], temperature=1.0)
    return torch.cat([micro.rows.proximal_logprobs[0] for micro in share.micro_batches])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = [
        "format",
        "in BF16",
        "exponent",
        "prompts",
        "UAQ",
        "KL",
        "its median",
        "largest ratio",
    ]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        arm = row["arm"]
        seen = f"{arm['prompts']}" if arm["exponent"] else ""
        kept = arm["keep"].strip("*.") if "what" not in arm else "activations"
        cells = [arm["format"], kept, f"{arm['exponent']:g}", seen, f"{arm.get('scale', UAQ):g}"]
        error = f"{row['kl']:.2e} ± {row['kl_error']:.0e}"
        cells += [error, f"{row['kl_median']:.1e}", f"{row['largest_ratio']:.1f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
