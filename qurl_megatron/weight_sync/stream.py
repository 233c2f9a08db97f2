"""What one request tells a server about a publish, and how buckets follow each other.

A server has a process group with each sender (`gather.py`); see `channel_name`. One request
announces all that comes through them. It is a manifest (`bucket.py`) in one of three forms:

    key frame        for each bucket a marker, which has the sender's number, and then the tensors:
        names   [bucket of sender 0, q_proj.weight_scale, q_proj.weight, bucket of sender 1, ...]
        dtypes  [uint8,              float32,             int8,          uint8,              ...]
        shapes  [[bytes],            [256, 1],            [256, 512],    [bytes],            ...]
    delta            names [delta of version 7], shapes [[number of senders]]
    in place         names [written in place]: nothing comes

Each bucket of a key frame is broadcast by its sender, in the order of the request. A delta is as
many buckets as a sender needs: each is preceded by its size, and an empty one is the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from qurl_megatron.weight_sync.bucket import Manifest
from qurl_megatron.weight_sync.delta import bucket_name

IN_PLACE = "written in place"
_MARKER = "bucket of sender "


def channel_name(token: str, sender: int) -> str:
    """Return the name of a server's process group with the sender of this number.

    That with the first sender has the server's token as its name, and stands for all of them in
    requests.
    """
    return f"{token}.{sender}" if sender else token


def announce(senders: Sequence[Sequence[Manifest]]) -> Manifest:
    """Announce a key frame: the buckets of each sender. The senders take turns."""
    names: list[str] = []
    dtypes: list[torch.dtype] = []
    shapes: list[Sequence[int]] = []
    for turn in itertools.zip_longest(*senders):
        for number, bucket in enumerate(turn):
            if bucket is not None:
                names += [f"{_MARKER}{number}", *bucket.names]
                dtypes += [torch.uint8, *bucket.dtypes]
                shapes += [[bucket.num_bytes], *bucket.shapes]
    return Manifest(names, dtypes, shapes)


def announce_delta(base: int, num_senders: int) -> Manifest:
    """Announce a delta of version `base`."""
    return Manifest([bucket_name(base)], [torch.uint8], [[num_senders]])


def announce_in_place() -> Manifest:
    """Announce that the parameters hold the new weights already."""
    return Manifest([IN_PLACE], [torch.uint8], [[0]])


def is_key_frame(names: Sequence[str]) -> bool:
    """Return whether a request with these names announces a key frame."""
    return bool(names) and names[0].startswith(_MARKER)


def read_key_frame(request: Manifest) -> Iterator[tuple[int, Manifest]]:
    """Yield the buckets that `announce` was given, as they come, each with its sender's number."""
    starts = [index for index, name in enumerate(request.names) if name.startswith(_MARKER)]
    for start, end in itertools.pairwise([*starts, len(request.names)]):
        run = slice(start + 1, end)
        bucket = Manifest(request.names[run], request.dtypes[run], request.shapes[run])
        yield int(request.names[start].removeprefix(_MARKER)), bucket
