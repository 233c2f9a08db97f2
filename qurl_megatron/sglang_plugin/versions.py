"""A weight version for every sampled token, and weight updates under running requests.

A server can receive weights while requests wait in the middle of their answers. Its scheduler, one
process per tensor-parallel rank, therefore keeps the version of the weights it has loaded:

- `update_weights` takes it from the request that brings a bucket. A publish pauses the server
  first, so no token is sampled between two buckets. A delta of a version that the scheduler does
  not hold is refused.
- `run_batch` stamps it on every token that a forward pass samples. SGLang carries the stamps to
  `meta_info["token_versions"]` of the answer, one per token. With the overlap schedule the tokens
  of a pass are read after the next pass has begun; a stamp at that point could be too new.
- `enqueue` makes it part of the key of cached prefixes. A request that is about to be prefilled
  finds only the prefixes of requests that began under the same version.
- `flush_cache` lets a paused scheduler empty its cache although requests wait.

The HTTP process records the version of each bucket, too, and reads the last one only.
`keep_newest` drops the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

from qurl_megatron.rollout.wire import FILE_PREFIX
from qurl_megatron.sglang_plugin.receive import leave
from qurl_megatron.weight_sync.bucket import IN_PLACE
from qurl_megatron.weight_sync.delta import base_version

STAMP = "token_versions"  # the name in meta_info


def update_weights(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Load weights and their version, around SGLang's `update_weights_from_distributed`."""
    scheduler = updater.scheduler
    base, held = base_version(request.names), loaded_version(scheduler)
    # The first bucket of a delta sets the version that others of the same delta bring too.
    if base is not None and held not in (base, int(request.weight_version)):
        if not request.group_name.startswith(FILE_PREFIX):
            # The senders would otherwise wait for their time limit.
            leave(updater.tp_worker.model_runner.weight_updater, request.group_name)
        return UpdateWeightsFromDistributedReqOutput(
            success=False, message=f"it holds version {held}, and was sent a delta of {base}"
        )
    scheduler.device_module.synchronize()  # the last pass before a pause may still read the weights
    if request.names == [IN_PLACE]:
        updater.flush_cache_after_weight_update(request)
        answer = UpdateWeightsFromDistributedReqOutput(success=True, message="Written in place.")
    else:
        answer = original(updater, request)
    if answer.success:
        scheduler.loaded_version = int(request.weight_version)
        for waiting in scheduler.waiting_queue:
            waiting.extra_key = cache_key(scheduler)
    return answer


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *options: Any, **named: Any
) -> Any:
    """Stamp the version on the tokens of a forward pass, around `Scheduler.run_batch`."""
    result = original(scheduler, batch, *options, **named)
    output = getattr(result, "logits_output", None)
    if output is not None:
        stamps = {STAMP: [loaded_version(scheduler)] * len(batch.reqs)}
        output.customized_info = {**(output.customized_info or {}), **stamps}
    return result


def enqueue(
    original: Callable[..., None], scheduler: Any, request: Any, *options: Any, **named: Any
) -> None:
    """Keep a request to prefixes of this version, around `Scheduler._add_request_to_queue`."""
    request.extra_key = cache_key(scheduler)
    original(scheduler, request, *options, **named)


def flush_cache(original: Callable[..., bool], scheduler: Any, *options: Any, **named: Any) -> bool:
    """Empty the cache of a paused scheduler, around `Scheduler.flush_cache`.

    SGLang refuses while requests wait, and `pause_generation` in mode `retract` makes all of them
    wait. They hold no keys and values then, so nothing of theirs is lost.
    """
    if not scheduler._engine_paused:
        return original(scheduler, *options, **named)
    queue, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        return original(scheduler, *options, **named)
    finally:
        scheduler.waiting_queue = queue


def keep_newest(original: Callable[..., None], manager: Any, source: str, **fields: Any) -> None:
    """Drop records that a new one hides, around `TokenizerManager.record_config_updates`.

    SGLang keeps a record of each bucket of every publish for as long as the server runs.
    """
    original(manager, source, **fields)
    *earlier, newest = manager._config_updates
    kept = [record for record in earlier if not record[1].keys() <= fields.keys()]
    manager._config_updates = [*kept, newest]


def loaded_version(scheduler: Any) -> int:
    """Return the version of the weights that a scheduler has loaded; 0 before the first update."""
    return getattr(scheduler, "loaded_version", 0)


def cache_key(scheduler: Any) -> str:
    """Return the part of a cached prefix's key that keeps versions apart."""
    return f"weights {loaded_version(scheduler)}"
