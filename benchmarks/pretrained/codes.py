"""Do codes show a small update? Each weight moves up or down by one amount, and is then quantized.

Shown is the length of the projection of a copy's move on that of the float32 weights, 1 if the copy
follows. Nothing is trained.

An arm with a rate asks what that is worth: the weights move by the rate against the sign of their
gradient, as in Adam's first step. KL(copy || moved policy) in nats, of the next token over the
whole vocabulary, at the tokens of right answers. What is no linear layer is in BF16 in each copy.
Activations are float32.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.pretrained.rounding import batches_of_sums
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.extensions.mismatch.mismatch import divergence
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.rounding import write_rounded

EVERY = 6  # of the model's linear layers, in alphabetical order
FORMATS = ("bf16", "int8", "fp8", "int4-g32")
MADE_OF = ("nearest", "unbiased", "masters")
COPIES = (
    *("bf16 of nearest", "bf16 of unbiased", "int8 of nearest", "int8 of unbiased"),
    "int8 of masters",
    "int8 of dithered masters",
)
ARMS: list[dict[str, Any]] = [
    *({"move": move} for move in (1e-6, 2e-5)),
    *({"rate": rate} for rate in (2e-6, 2e-5)),
]


def measure(model: Path, move: float = 0, rate: float = 0) -> dict[str, Any]:
    """Return what is shown, by format and by what is quantized, or the KL of such copies."""
    return {"kl": _distances(model, rate)} if rate else {"shown": _shown(model, move)}


def _shown(model: Path, move: float) -> dict[str, float]:
    stored = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    sums = {(name, made_of): [0.0, 0.0] for name in FORMATS for made_of in MADE_OF}
    for name in sorted(name for name in stored if name.endswith("_proj.weight"))[::EVERY]:
        start = stored[name].float()
        master = start + move * (torch.randint(0, 2, start.shape, generator=generator) * 2 - 1)
        moved = (master - start).double()
        for (weight_format, made_of), total in sums.items():
            values = master
            if made_of != "masters":
                values = torch.empty_like(stored[name])
                write_rounded(values, master, name, made_of)  # type: ignore[arg-type]
            copy = _copy(values, weight_format) - _copy(stored[name], weight_format)
            total[0] += float((copy * moved).sum())
            total[1] += float(moved.square().sum())
    return {" of ".join(way): along / squares for way, (along, squares) in sums.items()}


def _copy(weight: Tensor, weight_format: str) -> Tensor:
    if weight_format != "bf16":
        weight = quantize.dequantize(quantize.quantize(weight, weight_format))
    return weight.double()


@torch.no_grad()
def _distances(model: Path, rate: float) -> dict[str, list[float]]:
    """Return the KL of each copy and its standard error; also of the policy before the step.

    `at the start` is the KL between the start and its own INT8 copy.
    """
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = dict(policy.named_parameters())
    answers = batches_of_sums(model)
    held_out, learned = next(answers), next(answers)
    with torch.enable_grad():
        scores, sampled = _scores(policy, learned)
        torch.nn.functional.cross_entropy(scores, sampled).backward()
    start = {name: weight.clone() for name, weight in parameters.items()}

    def scores_of(copy: str, masters: dict[str, Tensor]) -> Tensor:
        for name, weight in parameters.items():
            weight.copy_(_copied(name, masters[name], copy))
        return _scores(policy, held_out)[0]

    def kl(copied: Tensor, exact: Tensor) -> list[float]:
        each = divergence(copied, exact)
        return [float(each.mean()), float(each.std() / len(each) ** 0.5)]

    before = scores_of("masters", start)
    own = kl(scores_of("int8 of masters", start), before)
    moved = {name: start[name] - rate * weight.grad.sign() for name, weight in parameters.items()}
    exact = scores_of("masters", moved)
    found = {copy: kl(scores_of(copy, moved), exact) for copy in COPIES}
    return {"before the step": kl(before, exact), "at the start": own, **found}


def _scores(policy: Any, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return logits `[answers' tokens, vocabulary]`, and the tokens themselves."""
    rows, masks = (
        pad_sequence(values.split(batch.lengths.tolist()), batch_first=True)
        for values in (batch.tokens.long(), batch.loss_mask)
    )
    hidden = policy.model(rows).last_hidden_state  # no token sees the padding, which comes after
    scored = masks[:, 1:]
    return policy.lm_head(hidden[:, :-1][scored]), rows[:, 1:][scored]


def _copied(name: str, master: Tensor, copy: str) -> Tensor:
    weight_format, _, made_of = copy.rpartition(" of ")
    is_linear = name.endswith("_proj.weight")
    values = master
    if copy != "masters" and not (is_linear and "masters" in made_of):
        values = torch.empty_like(master, dtype=torch.bfloat16)
        write_rounded(values, master, name, "nearest" if made_of == "nearest" else "unbiased")
    if not is_linear or weight_format != "int8":
        return values.float()
    quantized = quantize.quantize(values, "int8")
    if made_of == "dithered masters":
        dither = torch.rand(master.shape, generator=torch.Generator().manual_seed(0))
        return (master / quantized.scale + dither).floor().clamp(-127, 127) * quantized.scale
    return quantize.dequantize(quantized)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as two Markdown tables: what is shown, and the KL."""
    lines = [["move", "format", *MADE_OF], ["---"] * (2 + len(MADE_OF))]
    for row in rows:
        for name in FORMATS if "shown" in row else ():
            shown = [f"{row['shown'][f'{name} of {made_of}']:.3f}" for made_of in MADE_OF]
            lines.append([f"{row['arm']['move']:g}", name, *shown])
    distances = [row for row in rows if "kl" in row]
    rates = [["KL of a copy", *(f"{row['arm']['rate']:g}" for row in distances)]]
    rates += [["---"] * len(rates[0])]
    for copy in ("before the step", "at the start", *COPIES):
        kl = ["{:.1e} ± {:.0e}".format(*row["kl"][copy]) for row in distances]
        rates.append([copy, *kl])
    tables = ("\n".join(f"| {' | '.join(cells)} |" for cells in each) for each in (lines, rates))
    return "\n\n".join(tables)
