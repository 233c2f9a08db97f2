"""Drawing tokens on a CPU, and sampling masks for several completions of one prompt."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 64  # neighbouring weights that are summed first


def draw(weights: Tensor, num_samples: int) -> Tensor:
    """Draw an index of each row of `weights` [rows, size], as `torch.multinomial` does.

    torch draws one exponential per weight. This draws two uniform numbers per row and looks them up
    in cumulative sums: the first picks a block of weights, the second an index in it. An index of
    weight 0 is never drawn.

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
    # The product may round up to the total itself, which lies behind the last index.
    drawn = (torch.rand_like(total) * total).minimum(total.nextafter(torch.zeros_like(total)))
    # A row with NaN has no valid index; its log-prob, which is NaN too, reveals that.
    return torch.searchsorted(ends, drawn, right=True).clamp_(max=ends.shape[1] - 1)


class SamplersTorch:
    """Stands in for `torch` in SGLang's sampler on a CPU: `multinomial` is `draw`."""

    multinomial = staticmethod(draw)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def send(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Send a request to the scheduler, around `TokenizerManager._send_one_request`.

    Before SGLang samples several completions of a prompt, it sends a copy of the request that
    samples no token and only fills the prefix cache. The copy also asks for masks, but without
    tokens there are none, and SGLang would refuse all of the requests.
    """
    if request.sampling_params.max_new_tokens == 0:
        request.return_sampling_mask = False
        manager.rid_to_state[request.rid].obj.return_sampling_mask = False
    return original(manager, request)
