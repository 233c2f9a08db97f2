"""A server reads back from a request which buckets come, in which order, and from whom."""

from __future__ import annotations

import torch

from qurl_megatron.rollout.wire import dtype_names
from qurl_megatron.weight_sync.bucket import Bucket, Description
from qurl_megatron.weight_sync.delta import base_version
from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX
from qurl_megatron.weight_sync.stream import (
    announce,
    announce_delta,
    announce_in_place,
    channel_name,
    is_key_frame,
    read_key_frame,
    sibling,
)

BUCKETS = [
    [Bucket.pack({"a": torch.zeros(2, 3), "a codes": torch.zeros(4, dtype=torch.int8)})],
    [Bucket.pack({name: torch.zeros(5)}) for name in ("b", "c", "d")],
]


def test_the_senders_of_a_key_frame_take_turns_and_each_bucket_is_described() -> None:
    names, dtypes, shapes = announce(BUCKETS)
    assert is_key_frame(names) and base_version(names) is None
    words = dtype_names(dtypes)
    read = read_key_frame(names, words, shapes)
    assert [(bucket.sender, list(bucket.names)) for bucket in read] == [
        (0, ["a", "a codes"]),
        (1, ["b"]),
        (1, ["c"]),
        (1, ["d"]),
    ]
    assert [bucket.num_bytes for bucket in read] == [28, 20, 20, 20]
    assert list(read[0].dtypes) == ["float32", "int8"]
    assert list(read[0].shapes) == [[2, 3], [4]]


def test_deltas_and_weights_written_in_place_are_no_key_frames() -> None:
    request = announce_delta(7, num_senders=3)
    assert (base_version(request.names), request.shapes) == (7, [[3]])
    for names in (request.names, announce_in_place().names, ["model.norm.weight"], []):
        assert not is_key_frame(names)


def test_channels_of_one_server_are_found_from_any_of_them() -> None:
    for suffix in ("", GROUP_SUFFIX):
        names = [channel_name("http://127.0.0.1:9", sender, suffix) for sender in (0, 1, 12)]
        assert len(set(names)) == 3
        assert [sibling(names[0], sender) for sender in (0, 1, 12)] == names
        assert sibling(names[2], 0) == names[0]


def test_a_description_without_values_has_the_size_of_the_bucket() -> None:
    bucket = BUCKETS[0][0]
    described = Description.of([("a codes", torch.int8, (4,)), ("a", torch.float32, (2, 3))])
    assert described.num_bytes == bucket.flat.numel() == bucket.num_bytes
    assert list(described.names) == list(bucket.names)
