"""Draw tokens on a CPU, and let several answers to one prompt have sampling masks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 64  # neighbouring weights that are summed first


def draw(weights: Tensor, num_samples: int) -> Tensor:
    """Draw an index of each row of `weights` [rows, size], as `torch.multinomial` does.

    torch draws an exponential number for each weight. Here one uniform number chooses a block of
    weights by their cumulative sums, and another chooses a weight in the block. An index of weight
    0 is never drawn.

    Returns:
        [rows, 1] int64.
    """
    assert num_samples == 1, f"{num_samples} samples of a row"
    size = weights.shape[1]
    if size % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -size % BLOCK))
    blocks = weights.unflatten(1, (-1, BLOCK))
    block = _look_up(blocks.sum(-1))
    within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK)).squeeze(1)
    return (block * BLOCK + _look_up(within)).clamp_(max=size - 1)


def _look_up(weights: Tensor) -> Tensor:
    """Draw an index [rows, 1] int64 of each row of `weights` [rows, size], in float64."""
    ends = weights.double().cumsum(-1)
    total = ends[:, -1:]
    # A random number just below 1, times the total, may be rounded to the total: past the end.
    drawn = (torch.rand_like(total) * total).minimum(total.nextafter(torch.zeros_like(total)))
    # A row with NaN has no valid index; its log-prob, which is NaN too, reveals that.
    return torch.searchsorted(ends, drawn, right=True).clamp_(max=ends.shape[1] - 1)


class SamplersTorch:
    """torch as SGLang's sampler sees it on a CPU: its `multinomial` is `draw`."""

    multinomial = staticmethod(draw)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def send(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Send a request to the scheduler, around `TokenizerManager._send_one_request`.

    Before several answers to a prompt, SGLang fills the cache by a request of no new token. It is a
    copy of the others and would ask for masks too. It has none, so SGLang would refuse all.
    """
    if request.sampling_params.max_new_tokens == 0:
        request.return_sampling_mask = False
        manager.rid_to_state[request.rid].obj.return_sampling_mask = False
    return original(manager, request)
