"""The sequences of a pack, some of which share a prompt that is computed once.

The first sequence with a prompt is laid out whole, the others without the tokens that they share.
Only what mixes the tokens of a sequence needs them whole: attention and linear attention. They get
a copy of the shared keys and values for each sequence, and compute what they would without sharing.
All else, and so most of the work, is done once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Bounds of sequences, by which Megatron rotates their tokens.

    If prompts are shared, Megatron takes all tokens for one sequence, and `positions` say which row
    of the rotary table is whose.
    """

    whole: PackedSeqParams | None = None  # bounds of the whole sequences; None: nothing is shared
    rows: Tensor | None = None  # [tokens of whole sequences] int64, their places in the pack
    places: Tensor | None = None  # [tokens] int64, a place of each among those of whole sequences
    positions: Tensor | None = None  # [tokens] int64, in their sequences

    def mix(self, operation: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return `operation(*tensors, bounds)`, which mixes tokens of the whole sequences.

        The first dimension of the tensors and of the result are the tokens of the pack.
        """
        if self.whole is None or self.rows is None or self.places is None:
            return operation(*tensors, self)
        copies = [tensor.index_select(0, self.rows) for tensor in tensors]
        return operation(*copies, self.whole).index_select(0, self.places)
