"""Does a run's proof let right servers pass, and does it find wrong ones?

    python -m benchmarks.proof MODEL --formats int8 fp8 int4-g32 bf16 --temperatures 0.6 1.0
    python -m benchmarks.proof --output benchmarks/results/proof.jsonl --formats int8 fp8 int4-g32

MODEL is a Hugging Face directory; without one it is SmolLM2-135M-Instruct from its package. A twin
of a server draws the tokens: transformers' model, whose linear layers compute what a server's do
(`qurl_megatron/extensions/mismatch/quantized_model.py`). The learner scores them as a run does
before it trains. Each row is one kind of server:

    right         nothing is wrong
    raw           reports log-probs without the temperature
    warm, cold    draws at a temperature of 5/3 or 3/5 of the run's
    uaq           multiplies norms by 1.5, as UAQ does, but has the weights as they were
    stale         one block never received its weights
    swapped       gate and up of each block have each other's scales; not with bf16
    smoothed      has weights with the scales of smoothing, and norms without
    rotated       takes positions for a quarter of what they are, as with a wrong rope scaling

It prints the mean difference of log-probs, measured and as the learner predicts it, the mean of
proximal / behaviour, by how much tokens are likelier than they should be, and the verdict. The last
columns say how many of 100 draws of so many of the tokens would have found the server wrong.
"""

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks import machine
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.proof import (
    ENOUGH,
    LEAST,
    WrongRollouts,
    check_mismatch,
    evidence,
)
from qurl_megatron.config.schema import (
    FormatName,
    LearnerConfig,
    OptimizerConfig,
    ServerConfig,
    WeightFormat,
)
from qurl_megatron.files import append_lines
from qurl_megatron.quantization.activations import activation_dtype


@dataclass(frozen=True)
class Server:
    """How a server differs from a right one."""

    drawn_at: float = 1.0  # over the run's temperature
    is_raw: bool = False
    change: Callable[[Any, Sequence[Prompt]], None] = lambda twin, prompts: None


def _scale_norms(twin: Any, _: Sequence[Prompt]) -> None:
    for name, parameter in twin.model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data *= 1.5


def _empty_a_block(twin: Any, _: Sequence[Prompt]) -> None:
    blocks = sorted({name.split(".")[2] for name in twin.layers}, key=int)
    for name, layer in twin.layers.items():
        if name.split(".")[2] == blocks[len(blocks) // 2]:
            layer.codes, layer.scale = torch.zeros_like(layer.codes), torch.ones_like(layer.scale)
            layer.weight.data.zero_()  # what a BF16 server multiplies


def _swap_scales(twin: Any, _: Sequence[Prompt]) -> None:
    for name, gate in twin.layers.items():
        if name.endswith("gate_proj"):
            up = twin.layers[name.replace("gate_proj", "up_proj")]
            gate.scale, up.scale = up.scale, gate.scale


def _smooth_weights_alone(twin: Any, prompts: Sequence[Prompt]) -> None:
    norms = [each for each in twin.model.modules() if "Norm" in type(each).__name__]
    weights = [norm.weight for norm in norms]
    twin.smooth(prompts, 0.5)
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight = weight


def _shrink_positions(twin: Any, _: Sequence[Prompt]) -> None:
    twin.model.model.rotary_emb.inv_freq /= 4


MEANS = ("difference", "predicted", "ratio", "surprise")
SCORES = ("behaviour_logprobs", "proximal_logprobs", "predicted_logprobs", "entropy")
DRAWS = 100
SERVERS = {
    "right": Server(),
    "raw": Server(is_raw=True),
    "warm": Server(drawn_at=5 / 3),
    "cold": Server(drawn_at=3 / 5),
    "uaq": Server(change=_scale_norms),
    "stale": Server(change=_empty_a_block),
    "swapped": Server(change=_swap_scales),
    "smoothed": Server(change=_smooth_weights_alone),
    "rotated": Server(change=_shrink_positions),
}


@dataclass(frozen=True)
class Verdict:
    """What a proof finds of one server."""

    sums: dict[str, float]
    why: str  # empty: the servers sample the policy
    told: dict[int, float]  # by number of tokens: the fraction of draws that tell it

    def mean(self, name: str) -> float:
        """Return the mean of one of the `evidence`."""
        return self.sums[name] / self.sums["tokens"]


Drawn = list[tuple[Prompt, list[int], torch.Tensor]]
"""Of each completion its prompt, its token ids and their logits [tokens, vocabulary]."""


def draw(
    model: Path,
    weight_format: WeightFormat,
    server: Server,
    prompts: Sequence[Prompt],
    *,
    length: int,
    temperature: float,
    stop_token_ids: list[int],
) -> Drawn:
    """Draw one completion to each prompt, with logits over the temperature, as a server does."""
    from qurl_megatron.extensions.mismatch.quantized_model import QuantizedModel

    is_exact = weight_format == "bf16"
    codes = "int8" if is_exact else weight_format
    twin = QuantizedModel(model, codes, stop_token_ids, temperature)
    kept = twin.names if is_exact else []
    server.change(twin, prompts)
    steps: list[torch.Tensor] = []  # logits of a token of each completion
    twin.model.lm_head.register_forward_hook(lambda _, inputs, out: steps.append(out[:, -1]))
    sequences = twin.sample(prompts, length, 0, kept)
    # To compute them anew would not do: in another batch their rounding is another.
    logits = torch.stack(steps, 1)
    return [
        (prompt, sequence[1], logits[number, : len(sequence[1])])
        for number, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True))
    ]


def reported(drawn: Drawn, factor: float) -> TrainBatch:
    """Return completions with the log-probs that a server reports, of `factor` times the logits."""
    groups = []
    for prompt, ids, logits in drawn:
        logprobs = (logits * factor).log_softmax(-1)
        logprobs = logprobs.gather(1, torch.tensor(ids)[:, None].to(logits.device))
        completion = Completion(ids, logprobs.flatten().tolist(), "", False, [1] * len(ids))
        groups.append(RolloutGroup(prompt, [completion], [0.0]))
    return pack(groups).only("behaviour_logprobs")


def verdicts(
    model: Path,
    weight_format: WeightFormat,
    kinds: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    length: int = 24,
    temperature: float = 0.6,
    stop_token_ids: list[int],
) -> Iterator[Verdict]:
    """Yield what the proof finds of each kind of server. On one learner rank."""
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.reshard import Converter

    learner = Learner(model, LearnerConfig(dtype="float32"), OptimizerConfig())
    converter = Converter(learner, weight_format, 2**26)
    settings: Any = {"length": length, "stop_token_ids": stop_token_ids}
    drawn: dict[Any, Drawn] = {}  # by the last server
    for kind in kinds:
        server = SERVERS[kind]
        drawn_at, how = temperature * server.drawn_at, (server.drawn_at, server.change)
        if how not in drawn:  # a raw server draws what a right one does
            of_server = weight_format, server, prompts
            gc.collect()  # a twin is part of a reference cycle, and has most of a gigabyte
            drawn = {how: draw(model, *of_server, temperature=drawn_at, **settings)}
        share = learner.share(reported(drawn[how], drawn_at if server.is_raw else 1.0))
        learner.score(share, ["proximal_logprobs"], temperature=temperature)
        with learner.as_served(converter, ServerConfig()):
            learner.score(share, ["predicted_logprobs", "entropy"], temperature=temperature)
        rows, sums = _measured(learner, share)
        why = partial(
            _why,
            format=cast(FormatName, weight_format.removesuffix("-g32")),
            quantizes_activations=activation_dtype(weight_format) is not None,
            has_experts=learner.architecture.num_experts > 0,
        )
        yield Verdict(sums, why(sums), {size: _told(rows, size, why) for size in (LEAST, ENOUGH)})
    learner.close()


def _measured(learner: Any, share: Any) -> tuple[list[TrainBatch], dict[str, float]]:
    """Return the scored rows of a share, and the sums of their `evidence`."""
    rows: list[TrainBatch] = []

    def kept(batch: TrainBatch) -> dict[str, torch.Tensor]:
        rows.append(batch)
        return evidence(batch)

    sums = learner.measure(share, kept)
    return rows, sums


def _why(sums: dict[str, float], **facts: Any) -> str:
    """Return why a server is found wrong; empty if it is not."""
    try:
        check_mismatch("rollout", by_server={"": sums}, **facts)
    except WrongRollouts as wrong:
        return str(wrong)
    return ""


def _told(
    batches: Sequence[TrainBatch], size: int, why: Callable[[dict[str, float]], str]
) -> float:
    """Return the fraction of draws, with replacement, of so many tokens that tell a server."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    told = 0
    for _ in range(DRAWS):
        chosen = torch.randint(num_tokens, (size,), generator=generator)
        scores = {
            name: torch.cat([getattr(batch, name)[batch.loss_mask] for batch in batches])[chosen]
            for name in SCORES
        }
        rows: Any = SimpleNamespace(loss_mask=torch.ones(size, dtype=torch.bool), **scores)
        told += bool(why({name: value.item() for name, value in evidence(rows).items()}))
    return told / DRAWS


def prompts_of(model: Path, number: int) -> list[Prompt]:
    """Return small sums as chat prompts."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = [f"What is {7 * n % 13} plus {5 * n % 11}? Explain." for n in range(number)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    return [
        Prompt(str(n), text, "", list(each["input_ids"]))
        for n, (each, text) in enumerate(zip(ids, texts, strict=True))
    ]


def run(arguments: argparse.Namespace) -> None:
    """Print the table, on one learner rank."""
    from qurl_megatron.model.architecture import Architecture
    from qurl_megatron.model.tokenizer import load_tokenizer, stop_token_ids

    model: Path = arguments.model
    prompts = prompts_of(model, arguments.prompts)
    ends = stop_token_ids(Architecture.from_directory(model), load_tokenizer(model))
    print(
        "format    T   server   tokens  measured  predicted   ratio  surprise  verdict  told by "
        f"{LEAST}, by {ENOUGH}"
    )
    for weight_format in arguments.formats:
        for temperature in arguments.temperatures:
            servers = [*arguments.servers]
            if weight_format == "bf16" and "swapped" in servers:
                servers.remove("swapped")  # it has no scales
            found = verdicts(
                model,
                weight_format,
                servers,
                prompts,
                length=arguments.length,
                temperature=temperature,
                stop_token_ids=ends,
            )
            for kind, verdict in zip(servers, found, strict=True):
                means = [verdict.mean(name) for name in MEANS]
                if arguments.output:
                    row = {"format": weight_format, "temperature": temperature, "server": kind}
                    row |= {
                        "tokens": verdict.sums["tokens"],
                        **dict(zip(MEANS, means, strict=True)),
                    }
                    row |= {f"told_by_{size}": part for size, part in verdict.told.items()}
                    append_lines(arguments.output, [row | {"why": verdict.why}])
                print(
                    f"{weight_format:8} {temperature:3} {kind:8} {verdict.sums['tokens']:6.0f} "
                    f"{means[0]:9.2e} {means[1]:10.2e} {1 + means[2]:7.3f} {means[3]:9.3f}  "
                    f"{'wrong' if verdict.why else 'right':8}"
                    f"{''.join(f'{part:9.0%}' for part in verdict.told.values())}",
                    flush=True,
                )


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--formats", nargs="+", default=["int8"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--output", type=Path, help="a file to which rows are appended as JSON")
    arguments = parser.parse_args()
    machine.print_machine("torch", "transformers", "megatron-core")
    with machine.real_model(arguments.model) as arguments.model:
        machine.run_ranks(run, 1, arguments)


if __name__ == "__main__":
    main()
