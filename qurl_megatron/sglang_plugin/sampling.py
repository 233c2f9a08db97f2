"""Sampling masks of several answers to one prompt."""

from collections.abc import Callable
from typing import Any


def send(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Send a request to the scheduler, around `TokenizerManager._send_one_request`.

    Before several answers to a prompt, SGLang has a request without a token fill the cache. It is a
    copy of the others and would want masks too, of which there are none: SGLang would refuse all.
    """
    if request.sampling_params.max_new_tokens == 0:
        request.return_sampling_mask = False
        manager.rid_to_state[request.rid].obj.return_sampling_mask = False
    return original(manager, request)
