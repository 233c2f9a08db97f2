"""Check everything that can be wrong with a run, then create or update its directory.

`prepare_new` is for a new run, `prepare_resume` for an existing one, `prepare_resume_or_new` for
either. They return the run's configuration and the summary of its data. They raise
ArchitectureError, ConfigError or DataError, whose text is one line: what is wrong, where, and what
would be right.

With `writes=False` they only check. With `asks_servers=False` the run starts later or elsewhere:
they neither ask the servers of `rollout.servers_at` nor compare the base under adapters.
"""

import dataclasses
import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from datetime import date
from pathlib import Path

from qurl_megatron.config.disk import check_disk
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.gpus import H100, Node
from qurl_megatron.config.schema import OBJECTIVES, Config, ConfigError, UaqConfig
from qurl_megatron.config.text import Given, leaf_values, load, save, with_overrides
from qurl_megatron.config.validate import check_weight_format, validate, validate_resume
from qurl_megatron.data.problems import REASONING_GYM, local_data, parts_of
from qurl_megatron.data.rewards import absolute
from qurl_megatron.files import list_checkpoints, write_whole
from qurl_megatron.launch.placement import check_shared_gpus, choose_placement, place_servers
from qurl_megatron.launch.recipe import BASIS, Recipe, default_name, load_recipe, run_function
from qurl_megatron.launch.status import JOB_SCRIPT, claim, how_to_resume
from qurl_megatron.machine.output import qurl_command
from qurl_megatron.memory.host import (
    check_host,
    check_shared_memory,
    check_workers,
    use_cores,
)
from qurl_megatron.model import hub
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.tokenizer import read_template
from qurl_megatron.rollout import toolkit

# Fields that this module fills in where a recipe has these values, and what says where a run is.
SETTLED = {
    "rollout.stop_token_ids": [],
    "rollout.server.releases": "auto",
    "evaluation.server.releases": "auto",
    "learner.data_parallel_size": 1,
    "rollout.servers": 1,
}
OF_DIRECTORY = ("name", "output_dir", "recipe_file")

MODELS = ("model", "critic.model")  # the fields
DIRECTORIES = (*MODELS, "adapters.init")  # other sources are data


def prepare_new(
    recipe: str | Recipe,
    overrides: Iterable[str] = (),
    num_gpus: int | None = None,
    *,
    node: Node | None = None,
    writes: bool = True,
    asks_servers: bool = True,
) -> tuple[Config, str]:
    """Create a new run's directory: its config.yaml, data.txt, and a model that the recipe builds.

    Nothing is written before all checks have passed. `num_gpus` is the number of GPUs of this
    machine if the whole run is to fit on it; None skips that check. `node` describes the nodes of a
    job that runs it instead.
    """
    read = load_recipe(recipe, overrides)
    config = read.config
    config.recipe_file = dict(read.files) or config.recipe_file
    config.name = config.name or default_name(read.name)
    output = Path(config.output_dir)
    if file := next((each for each in (output, *output.parents) if each.is_file()), None):
        raise ConfigError(f"output_dir={output}: {file} is a file; choose another directory")
    if config.run_dir.exists():
        raise ConfigError(
            f"name={config.name}: {config.run_dir} exists; choose another name, or resume that "
            f"run: {qurl_command('resume', config.run_dir)}"
        )
    _find(config, Config())
    if said := _choose_scale(config, read.given):
        print(f"qurl: {said}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        built, train = Path(scratch) / "model", None
        if not config.model and config.model_builder:
            train = run_function(config.model_builder, built, config.seed)
            config.model = str(built)
        data_summary = _check(config, read.given, num_gpus, node, asks_servers)
        if writes:
            if num_gpus == 0:
                check_host(config)
            if train:
                train(config)
            config.run_dir.mkdir(parents=True)
            if built.exists():
                config.model = str(config.run_dir / "model")
                for path in built.iterdir():  # safetensors makes files that only this user can read
                    shutil.copymode(built / "config.json", path)
                shutil.move(built, config.model)
            _make_paths_absolute(config)
            _write(config, data_summary)
    return config, data_summary


def _choose_scale(config: Config, given: Collection[str]) -> str:
    """Give a recipe's UAQ the scale that suits format and model, unless one is `given`.

    Return a line that says so, where a recipe's scale becomes another one.
    """
    uaq = config.quantization.uaq
    if uaq == UaqConfig() or any(field.startswith("quantization.uaq.") for field in given):
        return ""
    if config.quantization.format == "bf16" or config.adapters.rank > 0:
        config.quantization.uaq = UaqConfig()  # there is no quantized update to scale
        return ""
    try:
        architecture = Architecture.from_directory(config.model)
    except ArchitectureError:  # which is refused later
        return ""
    if not architecture.num_experts:
        return ""
    scale = 1 if architecture.delta_net else 2  # `check_scales` has the reason
    config.quantization.uaq = UaqConfig(scale=scale)
    return f"quantization.uaq.scale={scale} for a model with experts, not {uaq.scale:g}"


def prepare_resume(
    run_dir: Path,
    overrides: Sequence[str | Given],
    num_gpus: int | None = None,
    *,
    node: Node | None = None,
    writes: bool = True,
    asks_servers: bool = True,
) -> tuple[Config, str]:
    """Apply overrides to an existing run, and write its config.yaml and data.txt.

    The run's directory may have been moved or renamed. An override may give the new place of a
    model or of data that is no longer where it was. `num_gpus` and `node` are as for
    `prepare_new`.

    If a file of the base under a checkpoint's adapters was touched since, the base is read and
    quantized whole, to compare its hash: on one core 1.5 s per GB of a BF16 model for INT8, and 6 s
    for INT4.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: not a run's directory, it has no config.yaml")
    if run_dir.name in ("", ".."):  # the directory's name becomes the run's
        run_dir = run_dir.resolve()
    with claim(run_dir) if writes else nullcontext():
        saved = load(run_dir / "config.yaml")
        was_built = Path(saved.model).parts[-2:] == (saved.name, "model")
        if was_built and (run_dir / "model").is_dir():
            saved.model = str(run_dir / "model")  # the recipe built it in the run's directory
        saved.output_dir, saved.name = str(run_dir.parent), run_dir.name
        config = with_overrides(saved, overrides)
        _find(config, saved)
        for each in (saved, config):
            _make_paths_absolute(each)
        _accept_new_places(saved, config)
        validate_resume(saved, config)
        newest = max(list_checkpoints(run_dir), default=None)
        done = int(newest.name.removeprefix("step_")) if newest else 0
        if config.steps < done:
            raise ConfigError(f"steps={config.steps}: the run has done {done}; give more")
        given = [
            each.partition("=")[0] if isinstance(each, str) else each.path for each in overrides
        ]
        data_summary = _check(config, given, num_gpus, node, asks_servers, resumes=True)
        if newest and config.adapters.rank and asks_servers:
            files = needed("adapters", "files", by=f"adapters.rank={config.adapters.rank}")
            files.check_base(config, newest, saved.model)
        if writes:
            if num_gpus == 0:
                check_host(config)
            _write(config, data_summary)
    return config, data_summary


def prepare_resume_or_new(
    recipe: str | Recipe, node: Node, script: str = "", **how: bool
) -> tuple[Config, str]:
    """Resume the named run, or create it, for a job on such nodes; `how` has both's options.

    The fields that the recipe's user has given change a run that exists, as those of
    `prepare_resume` do. The rest of the recipe must be as the run has it, unless `script` is that
    of the run's last job, which has nothing new to say.
    """
    read = load_recipe(recipe)
    if not read.config.name:
        raise ConfigError("name=: missing; a job needs it to find its run after a restart")
    run_dir = read.config.run_dir
    if (run_dir / "config.yaml").is_file():
        values = leaf_values(read.config)
        given = [Given(field, values[field]) for field in read.given - {"name", "output_dir"}]
        last = run_dir / JOB_SCRIPT
        try:
            if not (script and last.exists() and last.read_text() == script):
                check_as_saved(read, load(run_dir / "config.yaml"))
            return prepare_resume(run_dir, given, node=node, **how)
        except ConfigError as error:
            raise ConfigError(
                f"name={run_dir.name}: {run_dir} exists: {error}; choose another name; "
                f"{how_to_resume(run_dir)}"
            ) from None
    if run_dir.exists():
        raise ConfigError(f"name={run_dir.name}: {run_dir} exists and is not a run")
    return prepare_new(read, [], node=node, **how)


def check_as_saved(recipe: Recipe, saved: Config) -> None:
    """Check that a recipe has the values of an existing run in the fields that are not given.

    Raises:
        ConfigError: it has not; the message names the first field.
    """
    config = with_overrides(recipe.config, [])
    _choose_scale(config, recipe.given)
    before = leaf_values(saved)
    for field, value in leaf_values(config).items():
        is_open = value == "" or (field in SETTLED and value == SETTLED[field])
        if field not in {*recipe.given, *OF_DIRECTORY} and not is_open and value != before[field]:
            package = recipe.package or BASIS
            raise ConfigError(f"it has {field}={before[field]}, and {package} {value}")


def _write(config: Config, data_summary: str) -> None:
    save(config, config.run_dir / "config.yaml")
    write_whole(config.run_dir / "data.txt", data_summary)


def warn_of_pickles(directory: Path) -> None:
    """Print a line if a run or a checkpoint belongs to another user, whose code it may hold."""
    user = directory.stat().st_uid if directory.exists() else 0
    if user not in (0, os.getuid()):
        print(
            f"qurl: {directory} belongs to user {user}: its checkpoints hold pickles, which can "
            "run any program when they are read; go on only if you trust that user",
            file=sys.stderr,
        )


def sources(config: Config) -> dict[str, str]:
    """Return the models, adapters and data that a run reads, by field."""
    data = {f"evaluation.data.{name}": data for name, data in config.evaluation.data.items()}
    return {
        "model": config.model,
        "critic.model": config.critic.model,
        "adapters.init": config.adapters.init,
        "data": config.data,
        **data,
    }


def _change_sources(config: Config, change: Callable[[str, str], str]) -> None:
    """Replace each of `sources` by what a function returns for field and source."""
    changed = [change(field, source) for field, source in sources(config).items()]
    config.model, config.critic.model, config.adapters.init, config.data, *data = changed
    config.evaluation.data = dict(zip(config.evaluation.data, data, strict=True))


def _find(config: Config, saved: Config) -> None:
    """Replace names of the Hub with paths of their snapshots, and a chat template with its text.

    Models come without weights yet. `saved` is the run's configuration so far, whose commits are
    kept.
    """
    before = sources(saved)

    def find(field: str, source: str) -> str:
        if field in MODELS:
            return hub.local_model(source, before[field], hub.TOKENIZER)
        return source if field in DIRECTORIES else local_data(source, before.get(field, ""))

    _change_sources(config, find)
    config.chat_template = read_template(config.chat_template, Path(config.model))


def snapshots(config: Config) -> list[Given]:
    """Return what gives a job the snapshots and the chat template of this configuration."""
    found = [
        Given(field, source)
        for field, source in sources(config).items()
        if any(hub.snapshot_of(part.partition(":")[0]) for part in parts_of(source))
    ]
    template = config.chat_template
    return [*found, Given("chat_template", template)] if template else found


def _make_paths_absolute(config: Config) -> None:
    """Make models, data, a key and the user's functions independent of the working directory."""

    def change(field: str, source: str) -> str:
        parts = [source] if field in DIRECTORIES else parts_of(source)
        return ",".join(map(_absolute, parts))

    _change_sources(config, change)
    config.rollout.servers_key_file = _absolute(config.rollout.servers_key_file)
    config.reward = ",".join(map(absolute, config.rewards))
    by_source = config.source_rewards
    config.source_rewards = {source: absolute(name) for source, name in by_source.items()}
    config.model_builder = absolute(config.model_builder)
    config.objective.objective = absolute(config.objective.objective)
    config.rollout.agent = absolute(config.rollout.agent)


def _absolute(path: str) -> str:
    """Return a path as an absolute one; a generated task and an empty path as they are."""
    return str(Path(path).absolute()) if path and not path.startswith(REASONING_GYM) else path


def _accept_new_places(saved: Config, config: Config) -> None:
    """Take over from `config` the place of each model and data source that is gone in `saved`."""
    new = sources(config)
    _change_sources(
        saved, lambda field, source: source if _exists(source) else new.get(field, source)
    )


def _exists(source: str) -> bool:
    """Return whether a model or data source is there; DIR of DIR:SPLIT counts."""
    return all(
        part.startswith(REASONING_GYM)
        or any(glob.glob(path) for path in (part, part.partition(":")[0]))
        or Path(part).exists()
        for part in parts_of(source)
    )


def _check(
    config: Config,
    given: Collection[str],
    num_gpus: int | None,
    node: Node | None,
    asks_servers: bool,
    *,
    resumes: bool = False,
) -> str:
    """Check the fields, the models, the machine and the data, in the order of what they cost.

    `given` are the fields that the user has chosen; a placement among them is not changed. Return
    the summary of the data.
    """
    from qurl_megatron.data.prompts import load_prompts, summarize
    from qurl_megatron.data.scoring import check_reward
    from qurl_megatron.device import (
        capabilities,
        gpu_properties,
        machine_memory_bytes,
        unusable_gpus,
    )
    from qurl_megatron.model.huggingface import check_model
    from qurl_megatron.model.tokenizer import load_tokenizer, stop_token_ids

    architecture = validate(config)
    cores = use_cores(config, given) if num_gpus == 0 and not resumes else ""
    for said in filter(None, (cores, choose_placement(config, given, num_gpus or 0))):
        print(f"qurl: {said}", file=sys.stderr)
    placed = place_servers(config, num_gpus or 0)
    if num_gpus:
        check_weight_format(config.quantization.format, capabilities())
        toolkit.environment()
    elif num_gpus == 0 and (problem := unusable_gpus()):
        raise ConfigError(problem)
    if num_gpus is not None:
        check_workers(config.scoring_workers)
        check_shared_memory(config)
    columns = check_reward(config)
    if config.objective.objective not in OBJECTIVES:
        field = f"objective.objective={config.objective.objective}"
        needed("user_objective", "user_objective", by=field).check_objective(config)
    check_model(Path(hub.local_model(config.model)))
    if config.adapters.init:
        needed("adapters", "files", by="adapters.init").check_start(config, architecture)
    config.template_date = config.template_date or date.today().isoformat()
    template = (config.chat_template_options, config.template_date, config.chat_template)
    tokenizer = load_tokenizer(Path(config.model), *template)
    stops = config.rollout.stop_token_ids
    config.rollout.stop_token_ids = stops or stop_token_ids(architecture, tokenizer)
    of_agent = ""
    if config.rollout.agent:
        checks = needed("agents", "checks", by="rollout.agent")
        of_agent = checks.load(config.rollout, config.model, tokenizer, "rollout.")
    if config.advantage_estimator == "gae" and config.critic.model:
        check_model(Path(hub.local_model(config.critic.model)))
    if num_gpus:
        memory_bytes = min(gpu.total_memory for gpu in gpu_properties())
        gpu = dataclasses.replace(H100, memory_bytes=memory_bytes)
        node = Node(gpu, num_gpus, machine_memory_bytes())
    if config.rollout.placement == "colocated":
        colocated = needed("colocated", "fit", by="rollout.placement=colocated")
        colocated.settle(architecture, config, node)
    elif num_gpus:
        check_shared_gpus(config, placed, memory_bytes)
    check_disk(config)
    if asks_servers and config.rollout.servers_at:
        needed("elsewhere", "claims", by="rollout.servers_at").check(config, resumes=resumes)
    prompts = load_prompts(config, tokenizer, columns)
    available = len(prompts.train)
    if config.rollout.prompts_per_step > available:
        raise ConfigError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step}: {config.data} has "
            f"{available} problems to train on; a step must not repeat a prompt"
        )
    return summarize(config, prompts, tokenizer) + of_agent
