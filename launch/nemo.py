"""Every recipe as a factory of nemo-run's own command, `nemorun`.

    nemorun qurl train --factory RECIPE field=value ... --yes

nemo-run finds this module by its entry point. Without an executor the command is `qurl train`. With
one (`run.executor=NAME`, the user's LocalExecutor or SlurmExecutor) it is `qurl launch`, except
that files go to nemo-run's home. In Python, `resolve_factory(train, RECIPE)()` returns a Partial
whose `config` can be changed.
"""

import sys
from importlib import import_module

import nemo_run as run

from qurl_megatron import device
from qurl_megatron.config.overrides import overrides_between, with_overrides
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.launch import local
from qurl_megatron.launch.bad_input import exit_on_bad_input
from qurl_megatron.launch.experiment import make_job, start
from qurl_megatron.launch.prepare import prepare_new, print_data_summary, recipe_names

# This module has no `from __future__ import annotations`: `nemorun qurl train --help` shows the
# types of train's parameters, and fails on types that are strings.


class Context(run.cli.RunContext):
    """A `nemorun qurl` command, which takes the overrides of `qurl train`."""

    given: tuple[str, ...] = ()  # the overrides, with those that the recipe has already

    def parse_fn(self, fn, args, **_):  # type: ignore[no-untyped-def]  # like its parent
        """Return the recipe's Partial with overrides applied; exit if one of them is wrong."""
        with exit_on_bad_input():
            names = recipe_names()
            if self.factory not in names:
                raise ConfigError(f"--factory {self.factory}: recipes are {', '.join(names)}")
            config = with_overrides(recipe_config(self.factory), args)
            make_job(self.factory, args)
            self.given = tuple(args)
        partial = run.Partial(train, recipe=self.factory, config=config)
        if not (self.to_yaml or self.to_toml or self.to_json):
            # As an argument above, nemo-run would copy it, without its executor and `given`.
            partial.ctx = self
        return partial


@run.cli.entrypoint(namespace="qurl", type="experiment", run_ctx_cls=Context)
def train(recipe: str, config: Config, ctx: run.cli.RunContext | None = None) -> None:
    """Run a recipe, on this machine or through an executor."""
    with exit_on_bad_input():
        # A format or a model changes a recipe's scale, but not one that is given, whatever it is.
        given = list(ctx.given) if isinstance(ctx, Context) else []
        overrides = given + overrides_between(with_overrides(recipe_config(recipe), given), config)
        if ctx is not None and ctx.dryrun:
            return
        if ctx is None or ctx.executor is None:
            prepared = prepare_new(recipe, overrides, device.num_gpus())
            print_data_summary(prepared)
            sys.exit(local.run(prepared))
        job = make_job(recipe, overrides)
        sys.exit(start(job.config.name, [job], ctx.executor))


def recipe_config(name: str) -> Config:
    """Return the configuration of a recipe."""
    config = import_module(f"qurl_megatron.recipes.{name}").recipe()
    assert isinstance(config, Config)
    return config


def _register(name: str):  # type: ignore[no-untyped-def]  # nemo-run inspects it at run time
    def factory() -> run.Partial:
        return run.Partial(train, recipe=name, config=recipe_config(name))

    return run.cli.factory(factory, target=train, name=name)


for _name in recipe_names():
    _register(_name)
