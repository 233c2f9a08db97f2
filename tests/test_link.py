"""Which servers hold what was sent, by their checksums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qurl_megatron.quantization.checksum import part_key
from qurl_megatron.weight_sync.link import PublishError, verify


@pytest.mark.parametrize(("sent", "first"), [({"a": 1, "b": 2}, "b"), ({}, "a"), ({"a": 2}, "a")])
def test_a_server_with_fewer_more_or_other_tensors_does_not_hold_what_was_sent(
    sent: dict[str, int], first: str
) -> None:
    held = [{part_key("a", 0, 0): 1}]
    control: Any = SimpleNamespace(server=SimpleNamespace(url="http://a"), checksums=lambda: held)
    verify(control, {"a": 1})
    with pytest.raises(PublishError, match=f"1 of {len(sent)} checksums differ, first {first}$"):
        verify(control, sent)
