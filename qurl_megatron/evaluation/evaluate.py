"""Serve a model on this machine and measure its accuracy on data files: `qurl eval`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.validate import validate_lengths, validate_server
from qurl_megatron.data.problems import Fields, keep_verifiable, read_problems
from qurl_megatron.data.prompts import tokenize
from qurl_megatron.data.rewards import absolute
from qurl_megatron.data.scoring import Scorer, check_reward
from qurl_megatron.data.summary import source_lines
from qurl_megatron.evaluation.avg_at_k import Average, EvalConfig, averages, measure, write_answers
from qurl_megatron.files import write_whole
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import check_model, load_tokenizer
from qurl_megatron.process import ending_signals, exit_on
from qurl_megatron.quantization.offline import quantize_directory
from qurl_megatron.report.console import duration
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.options import check_options
from qurl_megatron.rollout.server import ServerPlan


def run(config: EvalConfig) -> None:
    """Measure and print a table; write `summary.json`, and a jsonl file of answers per data file.

    Raises:
        ConfigError, ArchitectureError, DataError: an input is wrong; the server is not started.
        ServerFailed: the server died.
    """
    output = Path(config.output)
    _check_fields(config)
    reward = Config(
        reward=absolute(config.reward),
        reward_timeout_s=config.reward_timeout_s,
        scoring_workers=config.scoring_workers,
    )
    check_reward(reward)
    console = Console(stderr=True, highlight=False)
    averages_of: dict[str, dict[str, Average]] = {}
    with tempfile.TemporaryDirectory(prefix="qurl-eval-") as scratch:
        model_dir = _hugging_face_directory(Path(config.model), Path(scratch))
        check_model(model_dir)
        architecture = Architecture.from_directory(model_dir)
        validate_server("server", config.server, architecture, config.format, config.max_length)
        validate_lengths(architecture, config.max_prompt_length, config.max_response_length)
        check_options({"server": config.server})
        tokenizer = load_tokenizer(model_dir)
        prompts = _load_prompts(config, reward, tokenizer)
        if config.format != "bf16":
            quantized = Path(scratch) / "quantized"
            quantize_directory(
                model_dir, quantized, config.format, lambda done, total: None, config.keep
            )
            model_dir = quantized
        output.mkdir(parents=True)
        with (
            Scorer(reward, reward.scoring_workers) as scorer,
            _serving(config, model_dir, console) as fleet,
        ):
            client = RolloutClient(fleet, tokenizer, architecture.eos_token_ids)
            for number, (data, problems) in enumerate(prompts.items()):
                requests = len(problems) * (2 if config.k else 1)
                with show_progress(data, requests, console) as answered:
                    results = measure(
                        client,
                        scorer.submit,
                        problems,
                        config.max_response_length,
                        k=config.k,
                        temperature=config.temperature,
                        top_p=config.top_p,
                        answered=answered,
                    )
                write_answers(results, output / f"answers_{number}.jsonl")
                averages_of[data] = averages(results)
    summary: dict[str, Any] = {"config": dataclasses.asdict(config), "results": {}}
    for data, named in averages_of.items():
        summary["results"][data] = {name: dataclasses.asdict(a) for name, a in named.items()}
    write_whole(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    Console().print(_table(config, prompts, averages_of))


def _check_fields(config: EvalConfig) -> None:
    """Check what can be wrong without looking at model and data.

    Raises:
        ConfigError: something is.
    """
    if Path(config.output).exists():
        raise ConfigError(f"output={config.output}: exists; choose another directory")
    if not config.data:
        raise ConfigError(
            "data: missing; give at least one file, dataset directory or reasoning_gym:TASK"
        )
    if config.format == "fp8-block" and device.accelerator() == "cpu":
        raise ConfigError("format=fp8-block: SGLang's own fp8 layers need a GPU; use format=fp8")


@contextlib.contextmanager
def _serving(config: EvalConfig, model_dir: Path, console: Console) -> Iterator[Fleet]:
    """Start a server of a model; yield a fleet of it, and end it afterwards."""
    output, start = Path(config.output), time.monotonic()
    console.print("starting the server", markup=False)
    exit_on(ending_signals() - {signal.SIGINT})
    plan = ServerPlan(
        model_dir,
        config.server,
        config.format,
        context_length=config.max_length,
        log_file=output / "server.log",
        seed=config.seed,
        loads=True,
    )
    with plan.running() as server:
        waited = f"{time.monotonic() - start:.0f} s"
        console.print(f"the server is up after {waited}: {server.url}", markup=False)
        with contextlib.closing(Fleet("evaluation", {0: server}, loaded=True)) as fleet:
            fleet.watch()
            yield fleet


@contextlib.contextmanager
def show_progress(title: str, requests: int, console: Console) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `requests`; it shows how many are answered.

    On a terminal that is a bar, elsewhere a line for each tenth.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    done, start = 0, time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_interactive) as bar:
        task = bar.add_task(title, total=requests)

        def answered() -> None:
            nonlocal done
            done += 1
            bar.advance(task)
            if not console.is_interactive and 10 * done // requests > 10 * (done - 1) // requests:
                left_s = (time.monotonic() - start) / done * (requests - done)
                line = f"{title}: {done} of {requests} requests, {duration(left_s)} left"
                console.print(line, markup=False, soft_wrap=True)

        yield answered


def _hugging_face_directory(model: Path, scratch: Path) -> Path:
    """Return `model`, or if that is a checkpoint, a directory with its export."""
    if not (model / "state.json").exists():
        return model
    from qurl_megatron.weight_sync.export import export_checkpoint

    export_checkpoint(model, scratch / "exported", lambda done, total: None)
    return scratch / "exported"


def _load_prompts(config: EvalConfig, reward: Config, tokenizer: Any) -> dict[str, list[Prompt]]:
    """Return the prompts of each data file, and print how many there are and what was dropped."""
    fields = Fields(config.question_key, config.answer_key)
    sources = {
        data: read_problems(data, {}, seed=config.seed, fields=fields) for data in config.data
    }
    keep_verifiable(sources, reward)
    prompts = {}
    for data, source in sources.items():
        prompts[data] = tokenize(
            source, tokenizer, config.max_prompt_length, system_prompt=config.system_prompt
        )
        for line in source_lines("data", source, {"to evaluate on": prompts[data]}):
            print(line, flush=True)
    return prompts


def _table(
    config: EvalConfig,
    prompts: dict[str, list[Prompt]],
    averages_of: dict[str, dict[str, Average]],
) -> Table:
    names = list(next(iter(averages_of.values())))
    table = Table("data", "problems", *names, title=f"{config.model} served in {config.format}")
    for data, named in averages_of.items():
        cells = [f"{a.mean:.1%} ± {a.standard_error:.1%}" for a in named.values()]
        table.add_row(data, str(len(prompts[data])), *cells)
    return table
