"""Check how a flat range of a tensor is cut into boxes, and the kernel of torch's Adam."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from operations import RecordedOperations
from qurl_megatron.learner.optimizer_shards import boxes, fuse_adam


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_the_boxes_of_a_range_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, values.numel()))
    stop = data.draw(st.integers(0, values.numel()))  # a range may be empty
    cut = list(boxes(shape, start, stop))
    assert len(cut) <= 2 * len(shape) - 1
    taken = []
    for box in cut:
        index = tuple(
            slice(offset, offset + size) for offset, size in zip(box.offset, box.shape, strict=True)
        )
        assert values[index].shape == box.shape
        assert values[index].flatten()[0] == box.start
        assert values[index].flatten()[-1] == box.stop - 1
        taken += values[index].flatten().tolist()
    assert taken == list(range(start, stop))


def test_a_range_over_several_rows_is_a_part_whole_rows_and_a_part() -> None:
    cut = [(box.offset, box.shape) for box in boxes((4, 5), 3, 17)]
    assert cut == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]


def test_torchs_adam_updates_a_parameter_in_one_kernel() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    parameter.grad = torch.arange(5.0)
    adam = torch.optim.AdamW([parameter], lr=0.1)
    fuse_adam(adam)
    with RecordedOperations() as operations:
        adam.step()
    assert torch.ops.aten._fused_adamw_.default in operations.found
    assert torch.ops.aten.sqrt.default not in operations.found


def test_another_adam_is_left_as_it_is() -> None:
    group = {"lr": 0.1, "bias_correction": True}
    fuse_adam(SimpleNamespace(param_groups=[group]))
    assert "fused" not in group
