"""Find which tokens, layers and activations make a quantized model differ: `qurl mismatch`.

The difference is KL(quantized || exact) of the next token, in nats. It is measured on tokens that
the quantized model sampled as a rollout server does, one completion to each prompt, at the
temperature of a run. Its mean is what `mismatch.json` of that run estimates. It is split in three:

    tokens        by entropy, position and rank of the sampled token: `split`
    layers        by how far it falls if one layer of a server stays in BF16: `gain`
    activations   by how coarse the codes of a layer's input are, and by the error of its result,
                  with smoothing and without: `quantized_model.ActivationMeter`

`choose` picks the layers to keep in BF16. It sees every other completion, and its effect is
measured on the rest, because the largest of many noisy gains overstates the true one.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.keep import fused_layers, kept_layers, module_of
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    QuantizationConfig,
    RolloutConfig,
    UaqConfig,
    WeightFormat,
)
from qurl_megatron.config.text import from_tree
from qurl_megatron.data.problems import read_problems
from qurl_megatron.data.prompts import draw, load_prompts, tokenize
from qurl_megatron.device import release_memory
from qurl_megatron.memory.estimate import published_bytes
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import check_model
from qurl_megatron.model.tokenizer import load_tokenizer, stop_token_ids
from qurl_megatron.report.progress import table_console

if TYPE_CHECKING:
    from qurl_megatron.extensions.mismatch.quantized_model import QuantizedModel, Sampled
    from qurl_megatron.quantization.smoothing import Smoothing

BATCH = 32  # sequences in one forward pass
FIRST = 4  # completions after which there is a figure; then twice as many, up to a batch
SHOWN = 8  # rows of the tables of layers and activations
SIGNIFICANT = 2.0  # standard errors above 0 from which a gain counts

EDGES: dict[str, Sequence[float]] = {  # lowest value in each row of a table
    "entropy": [0, 0.01, 0.1, 0.5, 1.0, 2.0],
    "position": [0, 1, 4, 16, 64, 256],
    "rank": [1, 2, 3, 11, 101],
}


class TokenMismatch(NamedTuple):
    """Measurements of each token: tensors `[completions, length]`, or `[tokens]` over all."""

    kl: Tensor  # KL(quantized || exact) where the token was sampled: float32, nats
    entropy: Tensor  # of the exact distribution there: float32, nats
    position: Tensor  # in the completion: int64, 0 for its first token
    rank: Tensor  # of the sampled token in the exact distribution: int64, 1 for the likeliest


def compare(quantized_logits: Tensor, exact_logits: Tensor, sampled: Tensor) -> TokenMismatch:
    """Compare two models where tokens were sampled.

    Args:
        quantized_logits, exact_logits: [completions, length, vocabulary] float32.
        sampled: [completions, length] int64.
    """
    exact = exact_logits.log_softmax(-1)
    chosen = exact.gather(2, sampled[:, :, None])
    return TokenMismatch(
        divergence(quantized_logits, exact_logits),
        -(exact.exp() * exact).sum(-1),
        torch.arange(sampled.shape[1]).expand(sampled.shape),
        (exact > chosen).sum(-1) + 1,
    )


def divergence(quantized_logits: Tensor, exact_logits: Tensor) -> Tensor:
    """Return KL(quantized || exact) of `[..., vocabulary]` float32 logits, in nats."""
    quantized = quantized_logits.log_softmax(-1)
    return (quantized.exp() * (quantized - exact_logits.log_softmax(-1))).sum(-1)


class TokenRow(TypedDict):
    """The tokens whose value is from `first` up to the next row's, and their part of the KL."""

    first: float
    tokens: float  # fraction of all tokens
    kl: float  # mean over these tokens, in nats
    of_kl: float  # fraction of the KL of all tokens


def split(kl: Tensor, values: Tensor, edges: Sequence[float]) -> list[TokenRow]:
    """Split tokens by `values` [tokens] at `edges`; rows without a token are left out."""
    row = torch.bucketize(values.double(), torch.tensor(edges, dtype=torch.float64), right=True)
    rows = []
    for index, first in enumerate(edges, start=1):
        chosen = kl[row == index].double()
        if len(chosen):
            of_kl = float(chosen.sum() / kl.double().sum().clamp(min=1e-300))
            tokens, mean = len(chosen) / len(kl), float(chosen.mean())
            rows.append(TokenRow(first=first, tokens=tokens, kl=mean, of_kl=of_kl))
    return rows


@dataclass(frozen=True)
class KeptLayers:
    """The gain and the cost of keeping layers of a server in BF16."""

    names: Sequence[str]  # in a Hugging Face checkpoint
    gain: float  # how far the KL falls, in nats per token
    standard_error: float  # of the gain
    added_bytes: int  # of a server's weights

    @property
    def is_significant(self) -> bool:
        """True if the gain is above 0 by more than `SIGNIFICANT` standard errors."""
        return self.gain > SIGNIFICANT * self.standard_error


def gain(before: Tensor, after: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Return how far the mean KL falls from `before` to `after`, and the standard error of that.

    Args:
        before, after: KL summed over each completion, in nats: [completions].
        tokens: number of tokens of each completion.
    """
    fallen, tokens = (before - after).double(), tokens.double()
    mean = float(fallen.sum() / tokens.sum())
    count = len(fallen)
    if count < 2:
        return mean, math.inf
    # Tokens of one completion depend on each other, so completions are the samples.
    variance = float((fallen - mean * tokens).square().sum()) * count / (count - 1)
    return mean, math.sqrt(variance) / float(tokens.sum())


def choose(layers: Sequence[KeptLayers], budget_bytes: float) -> list[KeptLayers]:
    """Return the layers to keep: the largest gains per byte, as long as they fit the budget.

    Layers whose gain is not significant are never chosen.
    """
    chosen: list[KeptLayers] = []
    for layer in sorted(layers, key=lambda layer: layer.gain / layer.added_bytes, reverse=True):
        fits = sum(other.added_bytes for other in [*chosen, layer]) <= budget_bytes
        if layer.is_significant and fits:
            chosen.append(layer)
    return chosen


@dataclass(frozen=True)
class MismatchOptions:
    """What `qurl mismatch` measures."""

    model: Path
    data: str
    weight_format: WeightFormat
    prompts: int = 64  # one completion for each
    max_completion_length: int = 128  # in tokens
    budget: float = 0.1  # largest growth of a server's weights, as a fraction
    seed: int = 0
    temperature: float = 1.0  # of the run, whose log-probs are of the logits over it
    smoothing: float = 0.0  # as `quantization.smoothing`
    run: Config | None = None  # whose prompts, UAQ and kept layers these are; None: of no run


def options_of(
    run: Config, prompts: int, longest: int, budget: float, seed: int
) -> MismatchOptions:
    """Return what to measure of a run that `validate` accepts, in answers of `longest` tokens.

    Raises:
        ConfigError: its servers multiply what its learner multiplies.
    """
    of_codes = {
        "adapters.rank": (run.adapters.rank, 0),
        "learner.quantized_forward": (run.learner.quantized_forward, "none"),
    }
    for field, (value, without) in of_codes.items():
        if value:
            raise ConfigError(
                f"{field}={value}: learner and servers multiply the same codes, so their distance "
                f"is not that of the codes from BF16; set it to {without} to measure that"
            )
    if run.quantization.format == "bf16":
        raise ConfigError("quantization.format=bf16: is not quantized; choose int8, int4 or fp8")
    return MismatchOptions(
        Path(run.model),
        run.data,
        run.quantization.weight_format,
        prompts,
        min(longest, run.rollout.max_completion_length),
        budget,
        seed,
        run.rollout.temperature,
        run.quantization.smoothing,
        run,
    )


def read_prompts(options: MismatchOptions) -> list[Prompt]:
    """Check the options and the model, and return the prompts to answer, drawn as a run draws.

    Raises:
        ArchitectureError, ConfigError, DataError: an input is wrong.
    """
    if options.weight_format == "bf16":
        raise ConfigError("--format bf16: is not quantized; choose int8, int4 or an fp8 format")
    try:
        from_tree(RolloutConfig, {"temperature": options.temperature})
        from_tree(QuantizationConfig, {"smoothing": options.smoothing})
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None
    check_model(options.model)
    architecture = Architecture.from_directory(options.model)
    architecture.check_blocks(options.weight_format)
    longest_prompt = architecture.max_position_embeddings - options.max_completion_length
    if longest_prompt < 1:
        raise ConfigError(
            f"--max-completion {options.max_completion_length}: the model has "
            f"{architecture.max_position_embeddings} positions, for prompt and completion"
        )
    if run := options.run:
        tokenizer = load_tokenizer(options.model, *run.prompts.template)
        run.rollout.stop_token_ids = _stops(options, architecture, tokenizer)
        kept = kept_layers(run.quantization.keep, architecture)
        if all(name in kept for group in fused_layers(architecture) for name in group):
            raise ConfigError("quantization.keep: keeps every layer, so nothing is quantized")
        train = load_prompts(run, tokenizer).train
        prompts = draw(train, run.seed, run.prompts.weights, options.prompts)
    else:
        tokenizer = load_tokenizer(options.model)
        read = tokenize(
            read_problems(options.data, {}, seed=options.seed),
            tokenizer,
            min(longest_prompt, Config().rollout.max_prompt_length),
            overlong="drop",
            stops=_stops(options, architecture, tokenizer),
        )
        prompts = draw(read, options.seed, count=options.prompts)
    if len(prompts) < 4:
        raise ConfigError(f"{options.data}: {len(prompts)} prompts; it takes at least 4")
    return prompts


def smoothing_by(prompts: list[Prompt], options: MismatchOptions) -> Smoothing | None:
    """Return the scales of smoothing by some of these prompts; the model is loaded for it."""
    smoothing = _load_model(options, draw(prompts, options.seed)).smoothing
    gc.collect()  # the model's hooks refer to it
    release_memory()
    return smoothing


def _stops(options: MismatchOptions, architecture: Architecture, tokenizer: Any) -> list[int]:
    own = options.run.rollout.stop_token_ids if options.run else []
    return own or stop_token_ids(architecture, tokenizer)


def _load_model(options: MismatchOptions, prompts: Sequence[Prompt]) -> QuantizedModel:
    """Return the quantized model, smoothed by `prompts` if the options say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns of a missing GPU, which is not needed here
        from qurl_megatron.extensions.mismatch.quantized_model import QuantizedModel

    architecture = Architecture.from_directory(options.model)
    quantization = options.run.quantization if options.run else QuantizationConfig()
    model = QuantizedModel(
        options.model,
        options.weight_format,
        _stops(options, architecture, load_tokenizer(options.model)),
        options.temperature,
        None if quantization.uaq == UaqConfig() else quantization.uaq,
        quantization.keep,
    )
    if options.smoothing:
        model.smooth(prompts, options.smoothing)
    return model


def measure(
    options: MismatchOptions,
    prompts: Sequence[Prompt],
    tell: Callable[[str], None],
    show: Callable[[dict[str, Any]], None],
    progress: Callable[[int], AbstractContextManager[Callable[[], None]]],
) -> dict[str, Any]:
    """Return what is measured, as it is written to a JSON file.

    The tokens come first. The layers take as many times longer as the model has layers.

    Args:
        tell: called with a line whenever more completions are measured.
        show: called with the result as soon as it lacks only the layers.
        progress: takes the number of passes for the layers, and yields a function to call after
            each.
    """
    architecture = Architecture.from_directory(options.model)
    model = _load_model(options, prompts)
    sampled: list[Sampled] = []
    parts: list[TokenMismatch] = []
    without: list[Tensor] = []  # KL summed over each completion, with no layer in BF16
    start, size = 0, FIRST
    while start < len(prompts):
        new = model.sample(
            prompts[start : start + size], options.max_completion_length, options.seed + start
        )
        of_batches, (of_new,) = _compare(model, new, _batches(new), [()])
        sampled, parts, without = sampled + new, parts + of_batches, [*without, of_new]
        start, size = start + size, min(2 * size, BATCH)
        number = sum(len(completion) for _, completion in sampled)
        mean = float(torch.cat(without).sum()) / number
        tell(
            f"{len(sampled)} of {len(prompts)} completions: KL {mean:.3g} nats a token, over "
            f"{number:,} tokens"
        )
    joined = (
        torch.cat([part.flatten().cpu() for part in column]) for column in zip(*parts, strict=True)
    )
    measured = TokenMismatch(*joined)
    result: dict[str, Any] = {
        "model": (options.run and options.run.model_builder) or str(options.model),
        "data": options.data,
        "format": options.weight_format,
        "smoothing": options.smoothing,
        "temperature": options.temperature,
        "uaq": options.run.quantization.uaq.scale if options.run else 1.0,
        "kept": options.run.quantization.keep if options.run else [],
        "completions": len(sampled),
        "tokens": len(measured.kl),
        "kl": float(measured.kl.double().mean()),
        "by_token": {
            name: split(measured.kl, getattr(measured, name), edges)
            for name, edges in EDGES.items()
        },
        "activations": [
            {"names": names, **meter.measured()}
            for names, meter in zip(model.groups, model.meters, strict=True)
        ],
    }
    show(result)
    batches, before = _batches(sampled), torch.cat(without)
    with progress((len(model.groups) + 1) * len(batches)) as report:
        of_layers = _compare(model, sampled, batches, model.groups, report)[1]
    tokens = torch.tensor([len(completion) for _, completion in sampled])
    # Layers are chosen on every other completion; their effect is measured on the rest.
    first, second = slice(0, None, 2), slice(1, None, 2)
    layers = [
        KeptLayers(
            names,
            *gain(before[first], after[first], tokens[first]),
            model.added_bytes(names),
        )
        for names, after in zip(model.groups, of_layers, strict=True)
    ]
    server_bytes = published_bytes(architecture, options.weight_format, tuple(result["kept"]))
    chosen = choose(layers, options.budget * server_bytes)
    kept = [name for layer in chosen for name in layer.names]
    after = _compare(model, sampled, batches, [kept])[1][0] if kept else before
    kl = float(before[second].sum() / tokens[second].sum())
    fallen, error = gain(before[second], after[second], tokens[second])
    tried = KeptLayers(kept, fallen, error, model.added_bytes(kept))
    return result | {
        "by_layer": list(map(asdict, layers)),
        "server_bytes": server_bytes,
        "tried": {"names": kept, "gain": fallen, "standard_error": error},
        "keep": shortened([*model.kept, *kept], model.names) if tried.is_significant else [],
        "kl_before": kl,
        "kl_after": kl - fallen if tried.is_significant else kl,
        "added_bytes": tried.added_bytes if tried.is_significant else 0,
    }


def _batches(sampled: Sequence[Sampled]) -> list[list[int]]:
    """Return the indices of sequences to compute together: those of equal lengths."""
    by_lengths: dict[tuple[int, int], list[int]] = {}
    for number, (prompt, completion) in enumerate(sampled):
        by_lengths.setdefault((len(prompt), len(completion)), []).append(number)
    batches = []
    for _, numbers in sorted(by_lengths.items()):
        batches += [numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)]
    return batches


def _compare(
    model: QuantizedModel,
    sampled: Sequence[Sampled],
    batches: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
    report: Callable[[], None] = lambda: None,
) -> tuple[list[TokenMismatch], Tensor]:
    """Compare the BF16 model with the quantized one that has each of `groups` of layers in BF16.

    `report` is called after each forward pass.

    Returns:
        What is measured of each batch's tokens for a group of no layers, [completions, length], and
        the KL summed over each completion: [groups, completions].
    """
    kl = torch.zeros(len(groups), len(sampled), dtype=torch.float64)
    tokens: list[TokenMismatch] = []
    for numbers in batches:
        sequences = [sampled[number] for number in numbers]
        exact = model.logits(sequences, model.names)
        report()
        for row, kept in enumerate(groups):
            quantized = model.logits(sequences, kept, measures=not kept)
            if not kept:
                completions = torch.tensor([completion for _, completion in sequences]).to(
                    exact.device
                )
                tokens.append(compare(quantized, exact, completions))
            kl[row, numbers] = divergence(quantized, exact).double().sum(1).cpu()
            report()
    return tokens, kl


def print_tokens(result: dict[str, Any]) -> None:
    """Print what a measurement says of tokens and activations."""
    console = table_console()
    smoothing = f" with smoothing {result['smoothing']:g}" if result["smoothing"] else ""
    smoothing += f" with UAQ of {result['uaq']:g}" if result["uaq"] != 1 else ""
    smoothing += f" without {', '.join(result['kept'])}" if result["kept"] else ""
    console.print(
        f"{result['model']} in {result['format']}{smoothing} at temperature "
        f"{result['temperature']:g}: KL {result['kl']:.3g} nats a token, over "
        f"{result['tokens']:,} tokens of {result['completions']:,} completions",
        soft_wrap=True,
        markup=False,
    )
    titles = {
        "entropy": "tokens by entropy in nats, from",
        "position": "tokens by position in the completion, from",
        "rank": "tokens by rank of the sampled token, from",
    }
    for name, title in titles.items():
        table = _new_table(title, ["of tokens", "mean KL", "of KL"])
        for row in result["by_token"][name]:
            cells = (f"{row['tokens']:.1%}", f"{row['kl']:.2g}", f"{row['of_kl']:.1%}")
            table.add_row(f"{row['first']:g}", *cells)
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


def print_layers(result: dict[str, Any]) -> None:
    """Print what a measurement says of layers, and what it recommends."""
    console = table_console()
    layers = sorted(result["by_layer"], key=lambda row: -row["gain"])
    title = "layers: fall of the KL if it stays in BF16; error of its result"
    columns = ["nats", "±", "of KL", "+ bytes", "error"]
    if result["smoothing"]:
        title, columns = f"{title}, and without smoothing", [*columns, "without"]
    table = _new_table(title, columns)
    errors = {_named(row): row for row in result["activations"]}
    for row in layers[:SHOWN]:
        of_result = errors[_named(row)]
        names = ("result_error", "result_error_unsmoothed")[: len(columns) - 4]
        of_results = [f"{of_result[name]:.1%}" for name in names]
        fall, error = f"{row['gain']:.1e}", f"{row['standard_error']:.1e}"
        of_kl = f"{row['gain'] / result['kl']:.0%}" if result["kl"] else ""
        table.add_row(_named(row), fall, error, of_kl, f"{row['added_bytes']:,}", *of_results)
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
        best = max(map(_as_kept, result["by_layer"]), key=lambda layer: layer.gain)
        why = "but does not fit the budget" if best.is_significant else "within two standard errors"
        return (
            f"Keep no layer in BF16: {module_of(best.names[0])} lowers the KL most, by "
            f"{best.gain:.2g} \u00b1 {best.standard_error:.2g} nats on the completions to choose "
            f"from, {why}."
        )
    names = ", ".join(dict.fromkeys(map(module_of, tried["names"])))
    return (
        f"Keep no layer in BF16: {names} looked best on some completions, and on "
        f"the others the KL fell by {tried['gain']:.2g} ± {tried['standard_error']:.2g} nats."
    )


def _as_kept(row: dict[str, Any]) -> KeptLayers:
    return KeptLayers(**row)


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


def shortened(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return `quantization.keep` for layers of these names.

    A layer that is chosen in every block becomes `*.down_proj`; other names are written out.
    """
    patterns = []
    names, all_names = [list(map(module_of, each)) for each in (names, all_names)]
    for name in names:
        last = name.rpartition(".")[2]
        everywhere = {other for other in all_names if other.endswith(f".{last}")}
        patterns.append(f"*.{last}" if len(everywhere) > 1 and everywhere <= {*names} else name)
    return list(dict.fromkeys(patterns))
