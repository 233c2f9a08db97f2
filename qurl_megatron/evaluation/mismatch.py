"""Find which tokens, layers and activations make a quantized model differ: `qurl mismatch`.

The quantized model samples a response to each prompt, as a rollout server does. On these tokens it
is compared with the same model in BF16: all layers quantized, then each layer of a server kept in
BF16 in turn. `qurl_megatron/evaluation/attribution.py` has the definitions.

The layers to keep are chosen on every other completion. What is said of them is measured on the
rest.
"""

from __future__ import annotations

import dataclasses
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
    KeptLayers,
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
from qurl_megatron.model.check import check_model, load_tokenizer
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

    measured, by_layer = _compare(model, sampled, batches, report)
    tokens = torch.tensor([len(response) for _, response in sampled])
    first, second = slice(0, None, 2), slice(1, None, 2)
    layers = [
        KeptLayers(
            names,
            *gain(by_layer[0][first], after[first], tokens[first]),
            model.added_bytes(names),
        )
        for names, after in zip(model.groups, by_layer[1:], strict=True)
    ]
    server_bytes = published_bytes(architecture, options.weight_format)
    chosen = choose(layers, options.budget * server_bytes)
    kept = [name for layer in chosen for name in layer.names]
    after = _kl_keeping(model, sampled, batches, kept) if kept else by_layer[0]
    report(passes * len(batches))
    kl = float(by_layer[0][second].sum() / tokens[second].sum())
    fallen, error = gain(by_layer[0][second], after[second], tokens[second])
    tried = KeptLayers(kept, fallen, error, model.added_bytes(kept))
    return {
        "model": str(options.model),
        "data": options.data,
        "format": options.weight_format,
        "completions": len(sampled),
        "tokens": len(measured.kl),
        "kl": float(measured.kl.double().mean()),
        "by_token": {
            name: list(map(dataclasses.asdict, split(measured.kl, getattr(measured, name), edges)))
            for name, edges in EDGES.items()
        },
        "by_layer": list(map(dataclasses.asdict, layers)),
        "activations": [
            {"names": names, **meter.measured()}
            for names, meter in zip(model.groups, model.meters, strict=True)
        ],
        "server_bytes": server_bytes,
        "tried": {"names": kept, "gain": fallen, "standard_error": error},
        "keep": shortened(kept, model.names) if tried.is_significant else [],
        "kl_before": kl,
        "kl_after": kl - fallen if tried.is_significant else kl,
        "added_bytes": tried.added_bytes if tried.is_significant else 0,
    }


def _batches(sampled: Sequence[Sampled]) -> list[list[int]]:
    """Return the numbers of sequences to compute together: those of equal lengths."""
    by_lengths: dict[tuple[int, int], list[int]] = {}
    for number, (prompt, response) in enumerate(sampled):
        by_lengths.setdefault((len(prompt), len(response)), []).append(number)
    batches = []
    for _, numbers in sorted(by_lengths.items()):
        batches += [numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)]
    return batches


def _compare(
    model: QuantizedModel,
    sampled: Sequence[Sampled],
    batches: Sequence[Sequence[int]],
    report: Callable[[int], None],
) -> tuple[TokenMismatch, Tensor]:
    """Compare the BF16 model with the quantized one: first whole, then with each layer in BF16.

    Returns:
        What is measured of the tokens of the whole model, [tokens], and the KL summed over each
        completion: [1 + layers, completions].
    """
    kl = torch.zeros(1 + len(model.groups), len(sampled), dtype=torch.float64)
    tokens: list[TokenMismatch] = []
    done = 0
    for numbers in batches:
        sequences = [sampled[number] for number in numbers]
        exact = model.logits(sequences, model.names)
        quantized = model.logits(sequences, measures=True)
        responses = torch.tensor([response for _, response in sequences]).to(exact.device)
        tokens.append(compare(quantized, exact, responses))
        kl[0, numbers] = tokens[-1].kl.double().sum(1).cpu()
        done += 2
        for row, group in enumerate(model.groups, start=1):
            kept = model.logits(sequences, group)
            kl[row, numbers] = divergence(kept, exact).double().sum(1).cpu()
            done += 1
            report(done)
    joined = (
        torch.cat([part.flatten().cpu() for part in parts]) for parts in zip(*tokens, strict=True)
    )
    return TokenMismatch(*joined), kl


def _kl_keeping(
    model: QuantizedModel,
    sampled: Sequence[Sampled],
    batches: Sequence[Sequence[int]],
    kept: Sequence[str],
) -> Tensor:
    """Return the KL summed over each completion, with these layers in BF16: [completions]."""
    kl = torch.zeros(len(sampled), dtype=torch.float64)
    for numbers in batches:
        sequences = [sampled[number] for number in numbers]
        exact = model.logits(sequences, model.names)
        kl[numbers] = divergence(model.logits(sequences, kept), exact).double().sum(1).cpu()
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
        for row in result["by_token"][name]:
            cells = (f"{row['tokens']:.1%}", f"{row['kl']:.2g}", f"{row['of_kl']:.1%}")
            table.add_row(f"{row['first']:g}", *cells)
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
