"""A server reads back tensors from a bucket, and from a request which buckets come from whom."""

import torch

from qurl_megatron.rollout.wire import dtype_names
from qurl_megatron.weight_sync.bucket import (
    Bucket,
    Manifest,
    announce,
    announce_delta,
    announce_in_place,
    changed_version,
    channel_name,
    is_key_frame,
    read_key_frame,
)
from sent import packed

TENSORS = {
    "codes": torch.arange(-3, 4, dtype=torch.int8),  # 7 bytes, after which nothing wider fits
    "fp8 codes": torch.tensor([[1.5, -448.0, 0.0]]).to(torch.float8_e4m3fn),
    "norm": torch.tensor([0.1, -2.0, 3.0]).bfloat16(),
    "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
    "scale": torch.tensor([[0.5], [0.25]]),
    "transposed": torch.arange(6.0).view(2, 3).t(),
}


def test_tensors_are_read_back_bit_for_bit() -> None:
    sent = packed(TENSORS)
    received = Bucket(sent.names, sent.dtypes, [list(shape) for shape in sent.shapes], sent.flat)
    tensors = dict(received.tensors())
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        expected = tensor.contiguous().view(torch.uint8)
        assert torch.equal(tensors[name].view(torch.uint8), expected), name


def test_the_widest_types_come_first_in_the_order_given_and_leave_no_gap() -> None:
    bucket = packed(TENSORS)
    assert list(bucket.names) == ["scale", "transposed", "norm", "empty", "codes", "fp8 codes"]
    assert bucket.flat.numel() == sum(tensor.nbytes for tensor in TENSORS.values())


def test_tensors_are_views_of_the_buffer() -> None:
    entries = [("a", torch.int8, (2, 3)), ("b", torch.uint8, (4,))]
    bucket = Bucket.empty(Manifest.of(entries), torch.device("cpu"))
    for number, (_, tensor) in enumerate(bucket.tensors()):
        tensor.fill_(number)
    assert bucket.flat.tolist() == [0] * 6 + [1] * 4


# The buckets of two senders, by team. A rank of the first's team sends experts, too.
BUCKETS = [
    [
        [packed({"a": torch.zeros(2, 3), "a codes": torch.zeros(4, dtype=torch.int8)})],
        [packed({"of experts": torch.zeros(5)})],
    ],
    [[packed({name: torch.zeros(5)}) for name in ("b", "c", "d")]],
    [[], [packed({"of other experts": torch.zeros(5)})]],
]


def test_the_senders_of_a_key_frame_take_turns_team_after_team() -> None:
    request = announce(BUCKETS)
    assert is_key_frame(request.names) and changed_version(request.names) is None
    sent = Manifest.read(request.names, dtype_names(request.dtypes), request.shapes)
    read = list(read_key_frame(sent))
    assert [(sender, list(bucket.names)) for sender, bucket in read] == [
        (0, ["a", "a codes"]),
        (1, ["b"]),
        (1, ["c"]),
        (1, ["d"]),
        (0, ["of experts"]),
        (2, ["of other experts"]),
    ]
    first = read[0][1]
    assert list(first.dtypes) == [torch.float32, torch.int8]
    assert list(first.shapes) == [(2, 3), (4,)]
    whole = BUCKETS[0][0][0]
    assert first.num_bytes == whole.num_bytes == whole.flat.numel() == 28


def test_deltas_and_weights_written_in_place_are_no_key_frames() -> None:
    request = announce_delta(7, num_senders=3)
    assert (changed_version(request.names), request.shapes) == (7, [[3]])
    assert not is_key_frame(request.names)
    for names in (announce_in_place().names, ["model.norm.weight"], []):
        assert not is_key_frame(names) and changed_version(names) is None


def test_the_channels_of_a_server_have_names_of_their_own() -> None:
    names = {channel_name(token, sender) for token in ("a", "b") for sender in range(13)}
    assert len(names) == 26 and {"a", "b"} < names
