"""Find which tokens, layers and activations make a quantized model differ: `qurl mismatch`.

The quantized model samples a response to each prompt, as a rollout server does. On these tokens it
is compared with the same model in BF16: all layers quantized, then each layer of a server kept in
BF16 in turn. `qurl_megatron/evaluation/attribution.py` has the definitions.

The layers to keep are chosen on every other completion. What is said of them is measured on the
rest.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import Config, ConfigError, WeightFormat
from qurl_megatron.data.problems import read_problems
from qurl_megatron.data.prompts import tokenize
from qurl_megatron.evaluation.attribution import (
    EDGES,
    LayerMismatch,
    Share,
    TokenMismatch,
    choose,
    compare,
    divergence,
    gain,
    module_of,
    shortened,
    split,
)
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import check_model, load_tokenizer
from qurl_megatron.planning.memory import published_bytes

if TYPE_CHECKING:
    from qurl_megatron.evaluation.quantized_model import QuantizedModel, Sampled

BATCH = 32  # sequences in one forward pass
SHOWN = 8  # rows of the tables of layers and activations


@dataclasses.dataclass(frozen=True)
class MismatchOptions:
    """What `qurl mismatch` measures."""

    model: Path
    data: str
    weight_format: WeightFormat
    prompts: int  # completions are one for each
    max_response_length: int  # in tokens
    budget: float  # largest growth of a server's weights, as a fraction
    seed: int


def read_prompts(options: MismatchOptions) -> list[Prompt]:
    """Check the options and the model, and return the prompts to answer.

    Raises:
        ArchitectureError, ConfigError, DataError: an input is wrong.
    """
    if options.weight_format == "bf16":
        raise ConfigError("--format bf16: is not quantized; choose int8, int4 or an fp8 format")
    check_model(options.model)
    architecture = Architecture.from_directory(options.model)
    if options.weight_format == "fp8-block":
        architecture.check_blocks()
    longest_prompt = architecture.max_position_embeddings - options.max_response_length
    if longest_prompt < 1:
        raise ConfigError(
            f"--max-response {options.max_response_length}: the model has "
            f"{architecture.max_position_embeddings} positions, for prompt and response"
        )
    prompts = tokenize(
        read_problems(options.data, {}, seed=options.seed),
        load_tokenizer(options.model),
        min(longest_prompt, Config().rollout.max_prompt_length),
        overlong="drop",
    )[: options.prompts]
    if len(prompts) < 4:
        raise ConfigError(
            f"{options.data}: {len(prompts)} prompts; it takes at least 4 to choose layers on some "
            "and to measure the choice on others"
        )
    return prompts


def measure(
    options: MismatchOptions, prompts: Sequence[Prompt], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return what is measured, as it is written to a JSON file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang misses a GPU that nothing here needs
        from qurl_megatron.evaluation.quantized_model import QuantizedModel

    architecture = Architecture.from_directory(options.model)
    model = QuantizedModel(options.model, options.weight_format)
    sampled: list[Sampled] = []
    for start in range(0, len(prompts), BATCH):
        chunk = prompts[start : start + BATCH]
        sampled += model.sample(chunk, options.max_response_length, options.seed + start)
    batches = _batches(sampled)
    passes = len(model.groups) + 4  # quantized and BF16, twice

    def report(done: int) -> None:
        progress(done, passes * len(batches))

    measured, positions, by_layer, activations = _compare(model, sampled, batches, report)
    tokens = torch.tensor([len(response) for _, response in sampled])
    first, second = slice(0, None, 2), slice(1, None, 2)
    layers = [
        LayerMismatch(
            names,
            gain(by_layer[0][first], after[first], tokens[first]),
            model.added_bytes(names),
        )
        for names, after in zip(model.groups, by_layer[1:], strict=True)
    ]
    server_bytes = published_bytes(architecture, options.weight_format)
    chosen = choose(layers, options.budget * server_bytes)
    kept = [name for layer in chosen for name in layer.names]
    after = _kl_keeping(model, sampled, batches, kept) if kept else by_layer[0]
    report(passes * len(batches))
    held_out = gain(by_layer[0][second], after[second], tokens[second])
    kl = float(by_layer[0][second].sum() / tokens[second].sum())
    advised = kept if held_out.is_significant else []
    values = {"entropy": measured.entropy, "position": positions, "rank": measured.rank}
    return {
        "model": str(options.model),
        "data": options.data,
        "format": options.weight_format,
        "completions": len(sampled),
        "tokens": len(measured.kl),
        "kl": float(measured.kl.double().mean()),
        "by_token": {
            name: [dataclasses.asdict(share) for share in split(measured.kl, value, EDGES[name])]
            for name, value in values.items()
        },
        "by_layer": [
            {
                "names": layer.names,
                "gain": layer.gain.mean,
                "standard_error": layer.gain.error,
                "added_bytes": layer.added_bytes,
            }
            for layer in layers
        ],
        "activations": activations,
        "server_bytes": server_bytes,
        "tried": {"names": kept, "gain": held_out.mean, "standard_error": held_out.error},
        "keep": shortened(advised, [name for group in model.groups for name in group]),
        "kl_before": kl,
        "kl_after": kl - held_out.mean if advised else kl,
        "added_bytes": sum(layer.added_bytes for layer in chosen) if advised else 0,
    }


def _batches(sampled: Sequence[Sampled]) -> list[list[int]]:
    """Return the numbers of sequences to compute together: those of equal lengths."""

    def lengths(index: int) -> tuple[int, int]:
        prompt, response = sampled[index]
        return len(prompt), len(response)

    batches = []
    for _, group in itertools.groupby(sorted(range(len(sampled)), key=lengths), key=lengths):
        numbers = list(group)
        batches += [numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)]
    return batches


def _compare(
    model: QuantizedModel,
    sampled: Sequence[Sampled],
    batches: Sequence[Sequence[int]],
    report: Callable[[int], None],
) -> tuple[TokenMismatch, Tensor, Tensor, list[dict[str, Any]]]:
    """Compare the quantized model, and it with each layer in BF16, with the BF16 model.

    Returns:
        The mismatch of all tokens and their positions; the KL summed over each completion
        [1 + layers, completions]: with all layers quantized, then with each in BF16; what was
        measured of the activations of each layer.
    """
    every = [name for group in model.groups for name in group]
    kl = torch.zeros(1 + len(model.groups), len(sampled), dtype=torch.float64)
    tokens: list[TokenMismatch] = []
    positions: list[Tensor] = []
    meters = model.meters()
    done = 0
    for numbers in batches:
        sequences = [sampled[number] for number in numbers]
        responses = torch.tensor([response for _, response in sequences])
        with model.keeping(every):
            exact = model.logits(sequences)
        with model.measuring(meters):
            quantized = model.logits(sequences)
        chosen = responses.flatten().to(exact.device)
        tokens.append(compare(quantized.flatten(0, 1), exact.flatten(0, 1), chosen))
        positions.append(torch.arange(responses.shape[1]).repeat(len(numbers)))
        kl[0, numbers] = tokens[-1].kl.view(responses.shape).double().sum(1).cpu()
        done += 2
        for row, group in enumerate(model.groups, start=1):
            with model.keeping(group):
                kept = model.logits(sequences)
            kl[row, numbers] = divergence(kept, exact).double().sum(1).cpu()
            done += 1
            report(done)
    activations = [
        {
            "names": names,
            "outlier_channel": meter.outlier[0],
            "outlier_ratio": meter.outlier[1],
            "error_per_token": meter.relative_errors[0],
            "error_per_128_channels": meter.relative_errors[1],
        }
        for names, meter in zip(model.groups, meters, strict=True)
    ]
    joined = TokenMismatch(
        *(
            torch.cat([getattr(part, field.name) for part in tokens]).cpu()
            for field in dataclasses.fields(TokenMismatch)
        )
    )
    return joined, torch.cat(positions), kl, activations


def _kl_keeping(
    model: QuantizedModel,
    sampled: Sequence[Sampled],
    batches: Sequence[Sequence[int]],
    kept: Sequence[str],
) -> Tensor:
    """Return the KL summed over each completion, with these layers in BF16: [completions]."""
    kl = torch.zeros(len(sampled), dtype=torch.float64)
    every = [name for group in model.groups for name in group]
    for numbers in batches:
        sequences = [sampled[number] for number in numbers]
        with model.keeping(every):
            exact = model.logits(sequences)
        with model.keeping(kept):
            kl[numbers] = divergence(model.logits(sequences), exact).double().sum(1).cpu()
    return kl


def print_mismatch(result: dict[str, Any]) -> None:
    """Print the tables of a measurement and what it recommends."""
    console = Console(highlight=False)
    console.print(
        f"{result['model']} in {result['format']}: KL {result['kl']:.3g} nats a token, over "
        f"{result['tokens']:,} tokens of {result['completions']:,} completions",
        soft_wrap=True,
        markup=False,
    )
    titles = {
        "entropy": "tokens by entropy in nats, from",
        "position": "tokens by position in the response, from",
        "rank": "tokens by rank of the sampled token, from",
    }
    for name, title in titles.items():
        table = _new_table(title, ["of tokens", "mean KL", "of KL"])
        for share in (Share(**row) for row in result["by_token"][name]):
            cells = (f"{share.tokens:.1%}", f"{share.kl:.2g}", f"{share.of_kl:.1%}")
            table.add_row(f"{share.first:g}", *cells)
        console.print(table)
    layers = sorted(result["by_layer"], key=lambda row: -row["gain"])
    table = _new_table(
        "layers: fall of the KL if it stays in BF16", ["nats", "±", "of KL", "+ bytes"]
    )
    for row in layers[:SHOWN]:
        fall, error = f"{row['gain']:.1e}", f"{row['standard_error']:.0e}"
        of_kl = f"{row['gain'] / result['kl']:.0%}" if result["kl"] else ""
        table.add_row(_named(row), fall, error, of_kl, f"{row['added_bytes']:,}")
    console.print(table)
    activations = sorted(result["activations"], key=lambda row: -row["outlier_ratio"])
    table = _new_table(
        "inputs of layers: largest channel over the median; error with a scale per token, per 128",
        ["channel", "ratio", "token", "128"],
    )
    for row in activations[:SHOWN]:
        errors = [f"{row[f'error_per_{unit}']:.2%}" for unit in ("token", "128_channels")]
        channel, ratio = str(row["outlier_channel"]), f"{row['outlier_ratio']:.1f}"
        table.add_row(_named(row), channel, ratio, *errors)
    console.print(table)
    console.print(_advice(result), soft_wrap=True, markup=False)


def _advice(result: dict[str, Any]) -> str:
    if result["keep"]:
        return (
            f"quantization.keep=[{', '.join(result['keep'])}]\n"
            f"lowers the KL from {result['kl_before']:.3g} to {result['kl_after']:.3g} nats on "
            f"completions that it was not chosen on, and adds {result['added_bytes']:,} bytes, "
            f"{result['added_bytes'] / result['server_bytes']:.1%}, to a server's weights."
        )
    tried = result["tried"]
    if not tried["names"]:
        return (
            "Keep no layer in BF16: none within the budget lowers the KL by more than two standard "
            "errors."
        )
    names = ", ".join(dict.fromkeys(map(module_of, tried["names"])))
    return (
        f"Keep no layer in BF16: {names} looked best on some completions, and on "
        f"the others the KL fell by {tried['gain']:.2g} ± {tried['standard_error']:.1g} nats."
    )


def _named(row: dict[str, Any]) -> str:
    """Return the name of a server's layer: `layers.0.self_attn.q_proj k_proj v_proj`."""
    first, *others = dict.fromkeys(map(module_of, row["names"]))
    short = first.removeprefix("model.")
    return " ".join([short, *(name.rpartition(".")[2] for name in others)])


def _new_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
