"""Every recipe as a factory of nemo-run's own command, and nemo-run's executors as job options.

    nemorun qurl train --factory RECIPE field=value ... --yes
    nemorun qurl train --yaml FILE field=value ... --yes      # a FILE of --to-yaml

nemo-run finds this module by its entry point. Without an executor, or with a LocalExecutor, the
command is `qurl train`. With a SlurmExecutor (`run.executor=NAME`) it is `qurl launch --executor
slurm`. nemo-run's own script would not do for its job: a step of that script gets no signal before
the time limit, and the script ends the job when the first side ends.

In Python, `resolve_factory(train, RECIPE)()` returns a Partial whose `config` can be changed.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import nemo_run as run
import yaml

from qurl_megatron.config.older import tree_now
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import from_tree, with_overrides
from qurl_megatron.launch.bad_input import exit_on_bad_input
from qurl_megatron.launch.experiment import GPUS_PER_NODE, JobOptions, launch
from qurl_megatron.launch.recipe import load_recipe, recipe_names

# This module has no `from __future__ import annotations`: `nemorun qurl train --help` shows the
# types of train's parameters, and fails on types that are strings.

# Fields of a SlurmExecutor that are options of sbatch.
SBATCH_FIELDS = """account partition time qos mem mem_per_gpu mem_per_cpu cpus_per_task cpus_per_gpu
    gpus_per_task constraint exclude gres network segment open_mode exclusive""".split()
# Fields that are honoured in another way, or ignored because the run decides them.
OTHER_FIELDS = """additional_parameters container_env container_image container_mounts env_vars
    gpus_per_node heterogeneous nodes setup_lines srun_args comment ntasks_per_node packager signal
    tunnel""".split()


class Context(run.cli.RunContext):
    """A `nemorun qurl` command, which takes the overrides of `qurl train`."""

    given: tuple[str, ...] = ()  # the overrides, even if they equal the recipe's values

    def parse_fn(self, fn, args, **_):  # type: ignore[no-untyped-def]  # like its parent
        """Return the recipe's Partial with overrides applied; exit if one of them is wrong."""
        # nemo-run's own form of a parameter's field is accepted too.
        words = [word.removeprefix("config.") for word in args]
        with exit_on_bad_input():
            recipe = self.factory
            if self.yaml:
                recipe, config = read_export(Path(self.yaml))
            else:
                config = load_recipe(recipe).config
            config = with_overrides(config, words)
            self.given = tuple(words)
        partial = run.Partial(train, recipe=recipe, config=config)
        if not (self.to_yaml or self.to_toml or self.to_json):
            # Not an argument above: nemo-run would copy it without its executor and `given`.
            partial.ctx = self
        return partial


@run.cli.entrypoint(namespace="qurl", type="experiment", run_ctx_cls=Context)
def train(recipe: str, config: Config, ctx: run.cli.RunContext | None = None) -> None:
    """Run a recipe, on this machine or through an executor."""
    with exit_on_bad_input():
        # A format or a model changes the recipe's UAQ scale, but never a scale that is given.
        named = load_recipe(recipe, ctx.given if isinstance(ctx, Context) else ())
        options = job_options(ctx.executor) if ctx and ctx.executor else None
        dry_run = ctx is not None and ctx.dryrun
        changed = dataclasses.replace(named, config=config)
        sys.exit(launch(changed, options=options, dry_run=dry_run))


def read_export(path: Path) -> tuple[str, Config]:
    """Return the recipe and the configuration of a file of `--to-yaml`.

    Raises:
        ConfigError: it is another file.
    """
    try:
        tree = _without_targets(yaml.safe_load(path.read_text()))
        load_recipe(str(tree["recipe"]))
        if others := tree.keys() - {"recipe", "config"}:
            raise ConfigError(f"it has {', '.join(map(str, others))} beside recipe and config")
        return tree["recipe"], from_tree(Config, tree_now(tree["config"]), extra="forbid")
    except RecursionError:
        raise ConfigError(f"--yaml {path}: refers to itself, or is nested too deeply") from None
    except (ConfigError, KeyError, TypeError, OSError, UnicodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--yaml {path}: not a file of --to-yaml ({reason})") from None


def _without_targets(tree: Any) -> Any:
    """Drop the entries by which nemo-run names the class of a section."""
    if not isinstance(tree, dict):
        return tree
    names = [name for name in tree if name not in ("_target_", "_partial_")]
    return {name: _without_targets(tree[name]) for name in names}


def job_options(executor: run.Executor) -> JobOptions | None:
    """Return what an executor asks of a job; None if the run is to be on this machine.

    The run decides the tasks of a node, the signal and the comment, and the package is copied
    whatever the packager. The number of nodes may be larger than the run needs; 1, nemo-run's
    default, stands for what the run needs. A LocalExecutor's variables are set here.

    Raises:
        ConfigError: the executor is of another kind, or has a field that cannot be honoured.
    """
    if isinstance(executor, run.LocalExecutor):
        _refuse_other_fields(executor, ["env_vars"])
        os.environ.update(executor.env_vars)
        return None
    if not isinstance(executor, run.SlurmExecutor):
        raise ConfigError(f"{type(executor).__name__}: give a LocalExecutor or a SlurmExecutor")
    if not isinstance(executor.tunnel, run.LocalTunnel):
        raise ConfigError("tunnel: give a LocalTunnel, and submit from a login node")
    _refuse_other_fields(executor, SBATCH_FIELDS + OTHER_FIELDS)
    sbatch = {name: getattr(executor, name) for name in SBATCH_FIELDS}
    sbatch["nodes"] = executor.nodes if executor.nodes > 1 else None
    if sbatch["nodes"] and executor.heterogeneous:
        raise ConfigError(
            f"nodes={executor.nodes}: a heterogeneous job has two groups of nodes, whose numbers "
            "follow from the run; leave it out"
        )
    return JobOptions(
        sbatch=sbatch | (executor.additional_parameters or {}),
        gpus_per_node=executor.gpus_per_node or GPUS_PER_NODE,
        heterogeneous=executor.heterogeneous,
        container_image=executor.container_image or "",
        container_mounts=executor.container_mounts,
        container_env=executor.container_env or (),
        environment=executor.env_vars,
        setup_lines=executor.setup_lines or "",
        srun_args=executor.srun_args or (),
    )


def _refuse_other_fields(executor: run.Executor, honoured: list[str]) -> None:
    """Raise ConfigError if a field that is not `honoured` differs from its default."""
    kind = type(executor)
    plain = kind(**{name: getattr(executor, name) for name in honoured})
    for name, value in vars(executor).items():
        if value != vars(plain)[name]:
            raise ConfigError(f"{kind.__name__} {name}={value!r}: not honoured; leave it out")


def _register(name: str):  # type: ignore[no-untyped-def]  # nemo-run inspects it at run time
    def factory() -> run.Partial:
        return run.Partial(train, recipe=name, config=load_recipe(name).config)

    return run.cli.factory(factory, target=train, name=name)


for _name in recipe_names():
    _register(_name)
