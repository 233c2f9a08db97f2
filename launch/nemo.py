"""Every recipe as a factory of nemo-run's own command, which finds this module by its entry point.

    nemorun qurl train --factory RECIPE field=value ... --yes

As `qurl train` without an executor; with one (`run.executor=NAME`, a LocalExecutor or SlurmExecutor
of the user's) as `qurl launch`, in nemo-run's home. In Python `resolve_factory(train, RECIPE)()` is
a Partial whose `config` can be changed.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

import nemo_run as run

import recipes
from launch import local
from launch.experiment import check, start
from launch.prepare import prepare, refusals
from qurl_megatron import device
from qurl_megatron.config.overrides import overrides_between, with_overrides
from qurl_megatron.config.schema import Config, ConfigError

NAMES = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


class Context(run.cli.RunContext):
    """A `nemorun qurl` command, whose words are those of `qurl train`."""

    def parse_fn(self, fn, args, **_):  # type: ignore[no-untyped-def]  # as its parent
        """The recipe's Partial with `field=value` words applied; a wrong one ends the command."""
        with refusals():
            if self.factory not in NAMES:
                raise ConfigError(f"--factory {self.factory}: recipes are {', '.join(NAMES)}")
            config = with_overrides(recipe_config(self.factory), args)
            check(self.factory, overrides_between(recipe_config(self.factory), config))
        return run.Partial(train, recipe=self.factory, config=config, ctx=self)


@run.cli.entrypoint(namespace="qurl", type="experiment", run_ctx_cls=Context)
def train(recipe: str, config: Config, ctx: run.cli.RunContext | None = None) -> None:
    """Run a recipe, on this machine or by an executor."""
    with refusals():
        words = overrides_between(recipe_config(recipe), config)
        if ctx is not None and ctx.dryrun:
            return
        if ctx is None or ctx.executor is None:
            sys.exit(local.run(prepare(recipe, words, device.num_gpus())))
        job = check(recipe, words)
        sys.exit(start(job.config.name, [job], ctx.executor))


def recipe_config(name: str) -> Config:
    config = import_module(f"recipes.{name}").recipe()
    assert isinstance(config, Config)
    return config


def _factory(name: str):  # type: ignore[no-untyped-def]  # nemo-run reads it as it runs
    def factory() -> run.Partial:
        return run.Partial(train, recipe=name, config=recipe_config(name))

    return run.cli.factory(factory, target=train, name=name)


for _name in NAMES:
    _factory(_name)
