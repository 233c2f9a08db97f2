"""Measure the accuracy of a model that a server of its own serves: `qurl eval`.

Each problem's answers are kept once there are all of them. Whatever ends an evaluation, the same
command continues it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.algorithm.proof import WrongRollouts
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    FormatName,
    ReadingConfig,
    RewardName,
    Rewards,
    Rounding,
    SamplingConfig,
    ScoringConfig,
    ServerConfig,
    WeightFormat,
    with_group_size,
)
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.config.text import leaf_values
from qurl_megatron.config.validate import (
    check_agent,
    check_group_size,
    check_rewards_fit,
    check_sets,
    validate_lengths,
    validate_server,
    validate_stop_tokens,
)
from qurl_megatron.config.values import (
    Directory,
    GroupSize,
    Place,
    Seed,
    SequencesOrZero,
    Several,
    Smoothing,
    Text,
)
from qurl_megatron.data.problems import Fields, keep_verifiable, read_problems
from qurl_megatron.data.prompts import quoted, source_lines, sum_of, tokenize, tokenizer_lines
from qurl_megatron.data.rewards import absolute, is_user_function, of_set, reads_entries
from qurl_megatron.data.scoring import check_rewards, scoring
from qurl_megatron.evaluation.avg_at_k import (
    Average,
    append_answer,
    averages,
    failures,
    measure,
    read_answers,
    write_answers,
)
from qurl_megatron.files import read_json_object, write_whole
from qurl_megatron.memory.host import check_workers, settle_caches
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import check_model, stored_block
from qurl_megatron.model.tokenizer import load_tokenizer, read_template, stop_token_ids
from qurl_megatron.quantization.offline import quantize_directory
from qurl_megatron.report.metrics import FAILURES
from qurl_megatron.report.progress import show_progress, table_console
from qurl_megatron.rollout.client import client_type
from qurl_megatron.rollout.controller import Controller
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.start import running

UNFINISHED = "unfinished.json"  # the settings, in the output of an evaluation that is not complete
# Fields and a section on which no result depends, but for `server.options`.
INDECISIVE = ("output", "scoring.workers", "agent_workers", "agent_episodes", "server")


@dataclass
class EvalConfig(SamplingConfig):
    """The settings of `qurl eval`."""

    model: Place = ""
    """Hugging Face directory, or a checkpoint of a run."""
    data: dict[Text, Several] = dataclasses.field(default_factory=dict)
    """Data that is measured separately, by the name it is reported under: DATA by itself, or
    `data.NAME=DATA`. Each value has the form of a run's `data`."""
    prompts: ReadingConfig = dataclasses.field(default_factory=ReadingConfig)
    """How its entries become prompts, as in a run."""
    reward: Rewards = "math"
    """Verifier of the answers, as in a run. Avg@1 and Avg@k are averages of its `accuracy`; with a
    reward function that gives no such number, of the reward itself. Several are a list: averages
    are those of the first, and an answer is kept with all of them."""
    scoring: ScoringConfig = dataclasses.field(default_factory=ScoringConfig)
    """How answers become rewards, as in a run."""
    reward_of: dict[Text, RewardName] = dataclasses.field(default_factory=dict)
    """Rewards of some data, by their names in `data`, in place of all these."""
    k: SequencesOrZero = 0
    """Number of sampled answers per problem. 0: Avg@1 only."""
    k_of: dict[Text, SequencesOrZero] = dataclasses.field(default_factory=dict)
    """`k` of some data, by their names in `data`."""
    format: FormatName = "bf16"
    """Format of the served weights."""
    adapters: Place = ""
    """Directory of adapters (LoRA), a run's `final_adapters` or peft's. They are merged into
    `model`, whose linear layers are first quantized to `format` and back, and served in BF16.
    Empty: none."""
    group_size: GroupSize = 128
    """Input channels that share a scale in format int4: a run's `quantization.group_size`."""
    output: Directory = "eval"
    """Directory of the results: a new one, or that of an evaluation with these settings that was
    interrupted and continues."""
    seed: Seed = 0
    """Seed of sampling, and of reasoning-gym's problems."""
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    """The SGLang server that answers."""
    keep: list[Text] = dataclasses.field(default_factory=list)
    """Linear layers that stay in BF16 in any `format`: a run's `quantization.keep`."""
    smoothing: Smoothing = 0.0
    """A run's `quantization.smoothing`, with scales by 64 of the prompts. The model is then in
    memory once before it is served. 0: none."""
    rounding: Rounding = "unbiased"
    """How float32 values become BF16 where adapters are merged, and where a float32 model is
    written in a quantized `format`: a run's `optimizer.rounding`."""

    @property
    def weight_format(self) -> WeightFormat:
        """The format and its group size."""
        return with_group_size(self.format, self.group_size)

    @property
    def served_format(self) -> WeightFormat:
        """The format in which the server holds weights."""
        return "bf16" if self.adapters else self.weight_format

    @property
    def scored(self) -> Config:
        """A run's configuration with these rewards."""
        by_source = {key: absolute(name) for key, name in self.scoring.by_source.items()}
        config = Config(
            reward=",".join(absolute(each.strip()) for each in self.reward.split(",")),
            scoring=dataclasses.replace(self.scoring, by_source=by_source),
        )
        config.evaluation.reward_of = {name: absolute(x) for name, x in self.reward_of.items()}
        return config

    def server_spec(self, model: Path) -> ServerSpec:
        """Return the server that loads this directory."""
        held = self.served_format, self.max_length, self.keep
        return ServerSpec(model, self.server, *held, loads=True)


def _title(config: EvalConfig) -> str:
    if not config.adapters:
        return f"{config.model} served in {config.format}"
    trained = _adapter_files(config).read_adapters(Path(config.adapters)).weight_format
    return f"{config.adapters}, trained over {trained}, merged over {config.weight_format}"


def _adapter_files(config: EvalConfig) -> Any:
    return needed("adapters", "files", by=f"adapters={config.adapters}")


def served_model(
    config: EvalConfig, model_dir: Path, directory: Path, prompts: list[Prompt]
) -> Path:
    """Return the directory of the weights that are served, which is written if it is another.

    Smoothing, if there is any, is by these prompts.
    """
    if config.format == "bf16" and not (config.adapters or stored_block(model_dir)):
        return model_dir

    def progress(done: int, total: int) -> None:
        pass

    if config.adapters:
        files = _adapter_files(config)
        adapters = files.read_adapters(Path(config.adapters))
        files.merge_directory(
            model_dir, directory, adapters, config.weight_format, progress, config.rounding
        )
    else:
        scales = None
        if config.smoothing:
            mismatch = needed("mismatch", "mismatch", by=f"smoothing={config.smoothing:g}")
            data = next(iter(config.data.values()))
            options = mismatch.MismatchOptions(
                model_dir, data, config.weight_format, smoothing=config.smoothing
            )
            scales = mismatch.smoothing_by(prompts, options)
        quantize_directory(
            model_dir,
            directory,
            config.weight_format,
            progress,
            config.keep,
            scales,
            config.rounding,
        )
    return directory


def settle_cache(config: EvalConfig, model: Path) -> None:
    """Set the size of the server's KV cache without a GPU; see `settle_caches`."""
    for line in settle_caches([config.server_spec(model)]):
        print(f"qurl: {line}", file=sys.stderr)


def settle_template(config: EvalConfig, model: Path, day: str) -> None:
    """Replace a chat template with its text, and give it a day to print unless it has one."""
    prompts = config.prompts
    prompts.chat_template = read_template(prompts.chat_template, model)
    prompts.template_date = prompts.template_date or day


def check(config: EvalConfig) -> None:
    """Check what any machine can check, without the model's weights and the data.

    Raises:
        ConfigError, ArchitectureError: an input is wrong.
    """
    if not config.data:
        raise ConfigError(
            "data: missing; give at least one file, dataset directory or reasoning_gym:TASK"
        )
    check_rewards_fit(config.scored)
    check_sets(config)
    model = Path(config.model)
    architecture = Architecture.from_directory(model / "model" if _is_checkpoint(model) else model)
    check_group_size(config.format, config.group_size, "group_size=")
    validate_server("server", config.server, architecture, config.served_format, config.max_length)
    if config.smoothing and config.served_format == "bf16":
        raise ConfigError(
            f"smoothing={config.smoothing:g}: the served weights are in BF16, so there is nothing "
            "to make easier; set it to 0"
        )
    if config.adapters:
        if config.keep:
            raise ConfigError("keep: a base under adapters has one format; leave it out")
        files = _adapter_files(config)
        files.check_adapters(files.read_adapters(Path(config.adapters)), architecture)
    check_agent(config, architecture)
    validate_stop_tokens(config.stop_token_ids, architecture)
    validate_lengths(architecture, config.max_prompt_length, config.max_completion_length)


def check_output(config: EvalConfig) -> None:
    """Check that the output is new, or holds answers to which this evaluation can add the others.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    output = Path(config.output)
    if not os.path.lexists(output):
        return
    if not (before := read_json_object(output / UNFINISHED)):
        raise ConfigError(f"output={output}: exists; choose another directory, output=DIR")
    if not _has_answers(output):
        return
    for field, value in _decisive(config).items():
        if before.get(field) != value:
            raise ConfigError(
                f"{field}={value}: {output} has answers of an interrupted evaluation with "
                f"{field}={before.get(field)}; give that to continue it, {_way_out(output)}"
            )
    begun = (output / UNFINISHED).stat().st_ctime
    for file in _read_files(config):
        if file.stat().st_ctime > begun:
            raise ConfigError(
                f"{file}: was changed since {output} has answers from before; {_way_out(output)}"
            )


def _way_out(output: Path) -> str:
    return f"choose another directory, output=DIR, or remove {output}"


def _has_answers(output: Path) -> bool:
    return next(output.glob("answers_*.jsonl"), None) is not None


def _decisive(config: EvalConfig) -> dict[str, Any]:
    """Return the fields on which the results depend, as JSON has them."""
    fields = json.loads(json.dumps(leaf_values(config)))
    # A list, because their order numbers the files of answers.
    fields["data"] = [f"{name}={data}" for name, data in fields["data"].items()]
    return {
        name: value
        for name, value in fields.items()
        if name == "server.options" or not {name, name.partition(".")[0]} & {*INDECISIVE}
    }


def _read_files(config: EvalConfig) -> Iterator[Path]:
    """Yield the files that decide answers or scores: of models, template, reward and agent."""
    rewards = [*config.scoring.by_source.values(), *config.reward_of.values()]
    named = [*config.scored.rewards, *rewards, config.agent]
    functions = [name.rpartition(":")[0] for name in named]
    given = [config.model, config.adapters, config.prompts.chat_template]
    for path in map(Path, [*given, *functions]):
        if path.is_file():
            yield path
        elif path != Path() and path.is_dir():
            yield from (each for each in path.rglob("*") if each.is_file())


def check_format(config: EvalConfig) -> None:
    """Check that this machine can serve the format.

    Raises:
        ConfigError: it cannot.
    """
    if config.format == "fp8-block" and device.accelerator() == "cpu":
        raise ConfigError("format=fp8-block: SGLang's own fp8 layers need a GPU; use format=fp8")


def run(config: EvalConfig) -> None:
    """Serve, measure and print a table; write `summary.json`, and jsonl answers per data file.

    `check` and `check_output` must have accepted the configuration. Answers that the output has
    already are kept.

    Raises:
        ConfigError, ArchitectureError, DataError: an input is wrong; the server is not started.
        ServerFailed: the server died.
    """
    check_format(config)
    output, given = Path(config.output), copy.deepcopy(config)
    scored = config.scored
    check_workers(scored)
    columns = check_rewards(scored)
    config.agent = absolute(config.agent)
    console = Console(stderr=True, highlight=False)
    averages_of: dict[str, dict[str, Average]] = {}
    with tempfile.TemporaryDirectory(prefix="qurl-eval-") as scratch:
        model_dir = _hugging_face_directory(Path(config.model), Path(scratch))
        check_model(model_dir)
        architecture = Architecture.from_directory(model_dir)
        settle_cache(config, model_dir)
        day = date.today().isoformat()
        if _has_answers(output):
            day = read_json_object(output / UNFINISHED).get("day", day)
        settle_template(config, model_dir, day)
        template = config.prompts.template
        tokenizer = load_tokenizer(model_dir, *template)
        config.stop_token_ids = config.stop_token_ids or stop_token_ids(architecture, tokenizer)
        if config.agent:
            needed("agents", "checks", by="agent").load(config, model_dir, tokenizer)
        prompts = _load_prompts(config, scored, tokenizer, columns)
        seen = next(iter(prompts.values()))
        served = served_model(config, model_dir, Path(scratch) / "converted", seen)
        with (
            unfinished(given, day, prompts, console),
            serving(config, served, console) as fleet,  # before any thread, so tests can fork it
            scoring(scored) as score_of,
            client_type(config, model_dir, template, scored.scoring.wrong, output) as make_client,
        ):
            client = make_client(fleet, tokenizer, config.stop_token_ids)
            for number, (name, problems) in enumerate(prompts.items()):
                path, k = output / f"answers_{number}.jsonl", config.k_of.get(name, config.k)
                known = read_answers(path)
                if known:
                    line = f"{path}: {len(known)} of {len(problems)} problems have their answers"
                    console.print(line, markup=False, soft_wrap=True)
                requests = (len(problems) - len(known)) * (2 if k else 1)
                with show_progress(name, requests, "requests", console) as answered:
                    results = measure(
                        client,
                        score_of(name),
                        problems,
                        config.max_completion_length,
                        k=k,
                        temperature=config.temperature,
                        top_p=config.top_p,
                        answered=answered,
                        known=known,
                        keep=partial(append_answer, path=path),
                    )
                write_answers(results, path)
                averages_of[name] = averages(results)
                if failed := failures(results):
                    console.print(f"{name}: {FAILURES}: {failed}", markup=False, soft_wrap=True)
            summary = {"config": config, "results": averages_of}
            text = json.dumps(summary, indent=2, default=dataclasses.asdict)
            write_whole(output / "summary.json", text + "\n")
    table_console().print(_table(config, prompts, averages_of))
    file = output / "answers_0.jsonl"
    first = read_answers(file)[0]
    print(f"answers are in {file}; the first question, and its answer, of reward", end=" ")
    print(
        f"{first.greedy.reward:g}:", *quoted(first.question), *quoted(first.greedy.text), sep="\n"
    )


@contextlib.contextmanager
def unfinished(
    config: EvalConfig, day: str, prompts: Mapping[str, list[Prompt]], console: Console
) -> Iterator[None]:
    """Mark the output as that of an unfinished evaluation, until the body has completed it.

    Args:
        config: the settings as they were given.
        day: that a chat template prints.
        prompts: those of each name in `data`.

    Raises:
        ConfigError: another process works on it, or it has answers to other prompts.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    marker, lock = output / UNFINISHED, os.open(output, os.O_RDONLY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"output={output}: another qurl eval works on it") from None
        except OSError:  # its file system locks no directories
            pass
        sums = {name: sum_of(each) for name, each in prompts.items()}
        if not _has_answers(output):
            settings = {**_decisive(config), "day": day, "problems": sums}
            write_whole(marker, json.dumps(settings, indent=2) + "\n")
        for name, known in read_json_object(marker).get("problems", sums).items():
            if known != sums[name]:
                raise ConfigError(
                    f"{config.data[name]}: has other problems than {output} has answers to; "
                    f"{_way_out(output)}"
                )
        try:
            yield
        except WrongRollouts:  # none of the answers can be believed
            for path in output.glob("answers_*.jsonl"):
                path.unlink()
            raise
        except Exception:
            if _has_answers(output):
                line = f"{output} keeps the answers so far; the same command continues"
                console.print(line, markup=False, soft_wrap=True)
            raise
        marker.unlink()


@contextlib.contextmanager
def serving(config: EvalConfig, model_dir: Path, console: Console) -> Iterator[Fleet]:
    """Start a server of a model, yield a fleet of it, and end it afterwards."""
    output, start = Path(config.output), time.monotonic()
    console.print("starting the server", markup=False)
    spec = config.server_spec(model_dir)
    with running(spec, output / "server.log", seed=config.seed) as server:
        waited = f"{time.monotonic() - start:.0f} s"
        console.print(f"the server is up after {waited}: {server.url}", markup=False)
        with contextlib.closing(Controller()) as controller:
            fleet = Fleet("evaluation", {0: server}, loaded=True, controller=controller)
            fleet.watch()
            yield fleet


def _hugging_face_directory(model: Path, scratch: Path) -> Path:
    """Return `model`, or if that is a checkpoint, a directory with its export."""
    if not _is_checkpoint(model):
        return model
    from qurl_megatron.weight_sync.export_checkpoint import export_checkpoint

    export_checkpoint(model, scratch / "exported", lambda done, total: None)
    return scratch / "exported"


def _is_checkpoint(model: Path) -> bool:
    return (model / "state.json").exists()


def _load_prompts(
    config: EvalConfig, scored: Config, tokenizer: Any, columns: Mapping[str, Collection[str]]
) -> dict[str, list[Prompt]]:
    """Return the prompts of each data file, and print how many there are and what was dropped."""
    sources, how = {}, config.prompts
    for name, data in config.data.items():
        of_data = of_set(scored, name)
        fields = Fields.of(
            how,
            for_function=is_user_function(of_data) or bool(config.agent),
            keeps_entries=reads_entries(of_data),
            columns=() if config.agent else columns.get(name, columns[""]),
        )
        sources[name] = read_problems(data, how.options, seed=config.seed, fields=fields)
    if not config.agent:
        keep_verifiable(sources, scored)
    prompts = {}
    for name, source in sources.items():
        prompts[name] = tokenize(
            source,
            tokenizer,
            config.max_prompt_length,
            system_prompt=how.system_prompt,
            stops=config.stop_token_ids,
        )
        for line in source_lines("data", source, {"to evaluate on": prompts[name]}):
            print(line, flush=True)
    first = next(iter(prompts.values()))
    for line in tokenizer_lines(tokenizer, config.stop_token_ids, first):
        print(line, flush=True)
    return prompts


def _table(
    config: EvalConfig,
    prompts: dict[str, list[Prompt]],
    averages_of: dict[str, dict[str, Average]],
) -> Table:
    measures = dict.fromkeys(measure for each in averages_of.values() for measure in each)
    table = Table("data", "problems", *measures, title=_title(config))
    for name, measured in averages_of.items():
        found = map(measured.get, measures)
        cells = [f"{a.mean:.1%} ± {a.standard_error:.1%}" if a else "" for a in found]
        table.add_row(name, str(len(prompts[name])), *cells)
    return table
