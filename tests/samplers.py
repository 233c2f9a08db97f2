"""A sampler of training batches on the only learner rank, with stand-ins for what it asks."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import Config
from qurl_megatron.loop.sampling import Sampler
from qurl_megatron.rollout.controller import Controller


def scores_of(values: Iterable[float]) -> Future[list[Score]]:
    """Return scores without parts that are there at once."""
    scores: Future[list[Score]] = Future()
    scores.set_result([Score(value, {}, failure="") for value in values])
    return scores


@contextmanager
def sampler_of(
    config: Config,
    client: Any,
    score: Any,
    prompts: list[Prompt],
    tokenizer: Any = None,
    *,
    servers_join: Callable[[], bool] = lambda: False,
    admit: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Sampler]:
    """Return a sampler within a process group, which is made if there is none."""
    with ExitStack() as stack:
        if not dist.is_initialized():
            device.initialize_distributed()
            stack.callback(dist.destroy_process_group)
        publisher: Any = SimpleNamespace(admit=admit, serving=nullcontext)
        controller = stack.enter_context(closing(Controller()))
        client = client or SimpleNamespace()
        if not hasattr(client, "metrics"):
            client.metrics = lambda groups: {}
        client.fleet = SimpleNamespace(has_joining=servers_join, controller=controller)
        sampler = Sampler(config, client, publisher, score, prompts, tokenizer, say)
        yield stack.enter_context(closing(sampler))
