"""How far is a served copy from the model, with smoothing and without it?

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
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, ServerConfig, UaqConfig
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


def _arm(weight_format: str, exponent: float, *, keep: str = "", seen: int = 8) -> dict[str, Any]:
    """Return an arm; smoothing sees the prompts of a step."""
    return {"format": weight_format, "exponent": exponent, "keep": keep, "prompts": seen}


ARMS: list[dict[str, Any]] = [
    *(_arm(weight_format, exponent) for weight_format in FORMATS for exponent in EXPONENTS),
    *(_arm("int8", exponent, keep="*.down_proj") for exponent in (0, 0.5)),
    _arm("int8", 0.5, seen=64),
]


class _WholeDistribution(PolicyModel):
    """A policy whose score of a token is the log-probs of all tokens, [1, scored, vocabulary]."""

    def score(  # type: ignore[override]
        self, hidden: Tensor, rows: TrainBatch, scored: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        logits = hidden[scored, 0] @ self.shared_embedding_or_output_weight().t()
        return (logits.log_softmax(-1)[None],)


def measure(model: Path, format: Any, exponent: float, keep: str, prompts: int) -> dict[str, Any]:
    """Return the KL, its median and the largest ratio, over all tokens of the answers."""
    learner, *_ = parts(model)
    outlier = smooth(model, exponent, prompts)
    converter = Converter(learner, format, 2**26, keep=[keep] if keep else [])
    row = distance(model, converter)
    print(format, exponent, keep, prompts, f"{row['kl']:.2e}", flush=True)
    return row | {"outlier": outlier}


def smooth(model: Path, exponent: float, prompts: int = 8) -> str:
    """Let the learner smooth what it sends; return by how much the worst outlier stands out."""
    learner, _, others = parts(model)
    learner.smoothing = None
    if not exponent:
        return ""
    seen = learner.share(pack([_unanswered(each) for each in others[:prompts]]).only())
    largest = learner.smooth(seen, exponent)
    return f"{largest.ratio:.0f} in {largest.name}"


def distance(model: Path, served: Served) -> dict[str, Any]:
    """Return how far a served copy is from the learner, over all tokens of the answers."""
    learner, answers, _ = parts(model)
    share = learner.share(pack(answers).only())
    exact = _scored(learner, share)
    with learner.as_served(served, ServerConfig()):
        copied = _scored(learner, share)
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
def parts(model: Path) -> tuple[Learner, list[RolloutGroup], list[Prompt]]:
    """Return a learner with UAQ, answers to some prompts of the recipe, and its other prompts."""
    from transformers import AutoModelForCausalLM

    config = smollm2.recipe()
    tokenizer = load_tokenizer(model)
    problems = read_problems(config.data, config.data_options, seed=config.seed)
    read = tokenize(problems, tokenizer, config.rollout.max_prompt_length)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    groups = []
    for prompt in read[:ANSWERED]:
        given = torch.tensor([prompt.token_ids])
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        row = policy.generate(given, max_new_tokens=LENGTH, eos_token_id=end, **settings)[0]
        groups.append(_answered(prompt, row[given.shape[1] :].tolist()))
    transform = uaq.transform(UaqConfig(1.5), is_hybrid=False)
    layout = LearnerConfig(dtype="float32", threads_per_rank=torch.get_num_threads())
    learner = Learner(
        model, layout, OptimizerConfig(), transform=transform, model=_WholeDistribution
    )
    return learner, groups, read[ANSWERED:]


def _answered(prompt: Prompt, token_ids: list[int]) -> RolloutGroup:
    zeros = [0] * len(token_ids)
    answer = Completion(
        token_ids, [0.0] * len(token_ids), "", truncated=False, token_versions=zeros
    )
    return RolloutGroup(prompt, [answer], [0.0])


def _unanswered(prompt: Prompt) -> RolloutGroup:
    return _answered(prompt, [0])


def _scored(learner: Learner, share: Any) -> Tensor:
    """Return the log-probs of all tokens at each sampled one: [sampled, vocabulary]."""
    learner.score(share, ["proximal_logprobs"], temperature=1.0)
    return torch.cat([micro.rows.proximal_logprobs[0] for micro in share.micro_batches])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = ["format", "in BF16", "exponent", "prompts", "KL", "its median", "largest ratio"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        arm = row["arm"]
        seen = f"{arm['prompts']}" if arm["exponent"] else ""
        cells = [arm["format"], arm["keep"].strip("*."), f"{arm['exponent']:g}", seen]
        error = f"{row['kl']:.2e} ± {row['kl_error']:.0e}"
        cells += [error, f"{row['kl_median']:.1e}", f"{row['largest_ratio']:.1f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
