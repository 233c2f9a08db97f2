"""The memory of a hybrid's linear attention in a learner rank."""

from qurl_megatron.model.delta_net import CHUNK, DeltaNet


def linear_attention_bytes(linear: DeltaNet, element: int, time: int, *, fused: bool) -> int:
    """Return the bytes that linear attention keeps per token, without the norm before it.

    FLA's kernels for the gated delta rule keep what `rehearsal.linear_attention` lists. torch keeps
    all tensors of the rule in float32, padded to whole chunks.
    """
    heads, keys, values = linear.value_heads, linear.keys, linear.values
    channels = 2 * keys + values
    # The projections and gates; the norm's input and output, and the gate in float32, before and
    # after SiLU; the gated output.
    kept = element * (channels + values + 3 * values) + 8 * values + heads * (element + 8)
    if fused:
        rule = 2 * keys + values + CHUNK * heads
        return kept + element * rule + 8 * linear.key_heads + heads * (element + 10)
    # The convolution copies its input once for each token in its window, and keeps its output.
    kept += (4 * linear.conv_width + element) * channels
    per_head = 40 * linear.key_dim + 12 * linear.value_dim + 20 * CHUNK + 28
    per_head += linear.key_dim * linear.value_dim * 4 // CHUNK  # the state of each chunk
    padded = -(-time // CHUNK) * CHUNK
    return kept + (heads * per_head + 8 * keys) * padded // time
