"""Serve a model on this machine and measure its accuracy on data files: `qurl eval`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.validate import validate_server
from qurl_megatron.data.problems import Fields, Tally, read_problems
from qurl_megatron.data.prompts import tokenize
from qurl_megatron.data.summary import source_lines
from qurl_megatron.files import write_whole
from qurl_megatron.loop.avg_at_k import Average, EvalConfig, averages, measure, write_answers
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.offline import quantize_directory
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.server import preloaded_sglang, start_server, wait_ready


def run(config: EvalConfig) -> None:
    """Measure and print a table; write `summary.json`, and a jsonl file of answers per data file.

    Raises:
        ConfigError, ArchitectureError, DataError: an input is wrong; the server is not started.
        ServerFailed: the server died.
        PreloadFailed: SGLang could not be imported.
    """
    output = Path(config.output)
    if output.exists():
        raise ConfigError(f"output={output}: exists; choose another directory")
    if not config.data:
        raise ConfigError(
            "data: missing; give at least one file, dataset directory or reasoning_gym:TASK"
        )
    if config.format == "fp8-block" and device.accelerator() == "cpu":
        raise ConfigError("format=fp8-block: SGLang's own fp8 layers need a GPU; use format=fp8")
    with (
        tempfile.TemporaryDirectory(prefix="qurl-eval-") as scratch,
        contextlib.ExitStack() as stack,
    ):
        model_dir = _hugging_face_directory(Path(config.model), Path(scratch))
        architecture = Architecture.from_directory(model_dir)
        length = config.max_prompt_length + config.max_response_length
        validate_server("server", config.server, architecture, length)
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        prompts = {data: _load_prompts(data, config, tokenizer) for data in config.data}
        if config.format != "bf16":
            quantized = Path(scratch) / "quantized"
            quantize_directory(model_dir, quantized, config.format, lambda done, total: None)
            model_dir = quantized
        output.mkdir(parents=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        preload = stack.enter_context(preloaded_sglang(output / "preload.log"))
        server = start_server(
            model_dir,
            config.server,
            config.format,
            context_length=length,
            log_file=output / "server.log",
            seed=config.seed,
            loads=True,
            preload=preload,
        )
        stack.callback(server.stop)
        wait_ready([server], config.server.start_timeout_s)
        client = RolloutClient(server, tokenizer, architecture.eos_token_ids)
        averages_of: dict[str, dict[str, Average]] = {}
        for number, (data, problems) in enumerate(prompts.items()):
            results = measure(
                client,
                problems,
                config.reward,
                config.max_response_length,
                k=config.k,
                temperature=config.temperature,
                top_p=config.top_p,
            )
            write_answers(results, output / f"answers_{number}.jsonl")
            averages_of[data] = averages(results)
    summary: dict[str, Any] = {"config": dataclasses.asdict(config), "results": {}}
    for data, named in averages_of.items():
        summary["results"][data] = {name: dataclasses.asdict(a) for name, a in named.items()}
    write_whole(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    Console().print(_table(config, prompts, averages_of))


def _hugging_face_directory(model: Path, scratch: Path) -> Path:
    """Return `model`, or if that is a checkpoint, a directory with its export."""
    if not (model / "state.json").exists():
        return model
    from qurl_megatron.weight_sync.export import export_checkpoint

    export_checkpoint(model, scratch / "exported", lambda done, total: None)
    return scratch / "exported"


def _load_prompts(data: str, config: EvalConfig, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of a data file, and print how many there are and what was dropped."""
    tally = Tally(data)
    fields = Fields(config.question_key, config.answer_key)
    problems = read_problems(data, {}, config.reward, seed=config.seed, fields=fields, tally=tally)
    prompts = tokenize(
        problems, tokenizer, config.max_prompt_length, system_prompt=config.system_prompt
    )
    for line in source_lines("data", tally, prompts, {"to evaluate on": len(prompts)}):
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
