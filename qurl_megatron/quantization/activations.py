"""Activations as the servers quantize them: token by token, on the fly (QuRL Eq. 2).

format               codes                   values of one scale
int8                 torch.int8              a token's input channels, on one rank of a server
fp8, fp8-tensor      torch.float8_e4m3fn     the same
fp8-block            torch.float8_e4m3fn     128 neighbouring channels of a token
int4, int4-g32, bf16 none: activations stay as they are

scale = absmax / largest code; codes = x / scale, rounded half to even
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # channels of one scale in `fp8-block`

_CODE_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8-tensor": torch.float8_e4m3fn,
    "fp8-block": torch.float8_e4m3fn,
}


def activation_dtype(weight_format: str) -> torch.dtype | None:
    """Return the dtype of the activations' codes; None if they are not quantized."""
    return _CODE_DTYPES.get(weight_format)


def quantize_tokens(
    x: Tensor, code_dtype: torch.dtype, absmax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize activations `x` [tokens, in] token by token. A row of zeros has codes 0.

    Args:
        absmax: [tokens, 1] float32, if a token's scale covers more channels than those of `x`.

    Returns:
        The codes' values [tokens, in] float32, and the scales [tokens, 1] float32.
    """
    largest = 127.0 if code_dtype == torch.int8 else torch.finfo(code_dtype).max
    x = x.float()
    absmax = x.abs().amax(dim=-1, keepdim=True) if absmax is None else absmax
    scale = absmax.clamp(min=1e-10) / largest
    codes = x / scale
    if code_dtype == torch.int8:  # rounding also removes what division adds to 127
        return codes.round_(), scale
    return codes.clamp_(-largest, largest).to(code_dtype).float(), scale


def in_groups(x: Tensor, columns: int) -> Tensor:
    """Return `x` [tokens, in] as [tokens * groups, columns], padded with zeros."""
    return pad(x, (0, -x.shape[1] % columns)).unflatten(1, (-1, columns)).flatten(0, 1)
