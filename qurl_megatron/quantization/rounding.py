"""Round float32 values to BF16 without bias, by a dither that never changes.

The weights of a BF16 checkpoint are BF16 numbers, and an update of RL moves a weight by a hundredth
of the distance to the next one. Rounding to the nearest BF16 number gives the old weight back, so
the update does not act. Here a value goes up from the number below it at as large a fraction of all
positions as it has moved up:

    x = sign(w) * floor(|w| / ulp + u) * ulp        0 <= u < 1, ulp: the distance of BF16 numbers

The dither u is a hash of the full tensor's Hugging Face name and of the position in it. So the mean
over many weights follows the float32 values, and yet a weight's BF16 value depends on its float32
value alone: not on the step, the rank, the layout, or on whether a run was resumed.

Invariants:
- A BF16 number stays as it is, bit for bit; so do zeros of either sign and infinities. NaN stays
  NaN, and no finite value becomes infinite.
- The result is one of the two BF16 neighbours of a value, and never falls while the value rises.
  That of -w is minus that of w.
- Up to the largest BF16 number, the mean of the results over all 65536 dithers is the value.
  Subnormal numbers are no exception.
- Nothing is kept but a key of 4 bytes for each row and each column.
- CPU and GPU compute the same. On a GPU it is one pass of `kernels.py`.

The dither is the upper half of a hash of 32 bits: hash(key of the row + key of the column). It has
two multiplications, because after one the dithers of two rows differ by nearly a constant.
"""

import functools
import hashlib

import torch
from torch import Tensor

from qurl_megatron.config.schema import Rounding

CHUNK_ELEMENTS = 2**17  # rounded at once: 512 KiB, within a core's cache
_LARGEST = 0x7F7F0000  # bits of the largest BF16 number
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # odd factors of the hash
_STEP = 0x9E3779B9 - 2**32  # an odd factor that spreads neighbouring numbers


def write_rounded(
    out: Tensor, values: Tensor, name: str, rounding: Rounding, offset: tuple[int, int] = (0, 0)
) -> None:
    """Write the part of a full tensor that begins at `offset` into `out`, of any dtype.

    Only float32 values are rounded to BF16 by `rounding`; other values and dtypes are converted as
    torch does.

    Args:
        out: of the shape of `values`.
        values: `[rows, columns]` or `[rows]`.
        name: the full tensor's.
        offset: row and column of the full tensor.
    """
    makes_bfloat16 = (values.dtype, out.dtype) == (torch.float32, torch.bfloat16)
    if makes_bfloat16 and rounding == "unbiased":
        keys = row_keys(name, offset[0], len(values), values.device)
        round_rows(out, values, keys, offset[1])
    else:
        out.copy_(values)


def row_keys(name: str, start: int, count: int, device: torch.device) -> Tensor:
    """Return the keys, `[count]` int32, of a full tensor's rows from `start` on."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return _keys(start, count, device, int.from_bytes(digest, "little", signed=True))


def round_rows(out: Tensor, values: Tensor, keys: Tensor, first_column: int = 0) -> None:
    """Round rows of a tensor without bias.

    Args:
        out: BF16, of the shape of `values`.
        values: `[rows, columns]` or `[rows]` float32.
        keys: `[rows]` int32, of these rows.
        first_column: the column of the full tensor at which `values` begins.
    """
    if values.dim() == 1:
        out, values = out[:, None], values[:, None]
    columns = _column_keys(first_column, values.shape[1], values.device)
    if values.is_cuda:
        from qurl_megatron.quantization import kernels

        kernels.round_rows(out, values.contiguous(), keys, columns, (_FIRST, _SECOND))
        return
    step = max(1, CHUNK_ELEMENTS // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        dither = _hash(keys[rows, None] + columns).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        add_dither(out[rows], values[rows], dither)


def add_dither(out: Tensor, values: Tensor, dither: Tensor) -> None:
    """Round float32 `values` into BF16 `out`; `dither` is int32, u * 65536, and is used up."""
    # A NaN may lie in the lower bits alone. A product with 1 sets the highest bit of its fraction.
    bits = (values * 1.0).view(torch.int32)
    # -1 below the largest number. From there on 0: a dither would make infinity of it.
    is_below = (bits & 0x7FFFFFFF).sub_(_LARGEST).bitwise_right_shift_(31)
    out.view(torch.int16).copy_(dither.bitwise_and_(is_below).add_(bits).bitwise_right_shift_(16))


@functools.lru_cache(maxsize=256)  # layers have the same shapes, in this step and the next
def _column_keys(start: int, count: int, device: torch.device) -> Tensor:
    return _keys(start, count, device)


def _keys(start: int, count: int, device: torch.device, seed: int = 0) -> Tensor:
    """Return hashes of start, start + 1, ...: `[count]` int32, other ones for each seed."""
    numbers = torch.arange(start, start + count, dtype=torch.int32, device=device)
    hashed = _hash(numbers.mul_(_STEP).add_(seed))
    return hashed.bitwise_xor_(hashed >> 16)


def _hash(numbers: Tensor) -> Tensor:
    """Hash int32 numbers in place; the upper half of the result is random."""
    numbers.bitwise_xor_(numbers >> 16).mul_(_FIRST)  # int32 wraps around
    return numbers.bitwise_xor_(numbers >> 15).mul_(_SECOND)
