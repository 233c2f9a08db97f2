"""What one request tells a server about a publish, and how buckets follow each other.

A server has a channel, which is a process group, with each sender (`gather.py`); see
`channel_name`. One request announces all that comes through its channels, in one of three forms:

    key frame        for each bucket a marker, which has the sender's number, and then the tensors:
        names   [bucket of sender 0, q_proj.weight_scale, q_proj.weight, bucket of sender 1, ...]
        dtypes  [uint8,              float32,             int8,          uint8,              ...]
        shapes  [[bytes],            [256, 1],            [256, 512],    [bytes],            ...]
    delta            names [delta of version 7], shapes [[number of senders]]
    in place         names [written in place]: nothing comes

Each bucket of a key frame is broadcast by its sender, in the order of the request. A delta is as
many buckets as a sender needs: each is preceded by its size, and a size of 0 ends them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from qurl_megatron.weight_sync.bucket import Description
from qurl_megatron.weight_sync.delta import bucket_name

IN_PLACE = "written in place"
_MARKER = "bucket of sender "


class Announcement(NamedTuple):
    """The lists of a request to a server, of equal length."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[list[int]]


class Announced(NamedTuple):
    """One bucket of a key frame."""

    sender: int  # its number among the senders
    num_bytes: int
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]


def channel_name(token: str, sender: int, suffix: str = "") -> str:
    """Return the name of the process group of a server with the sender of this number."""
    return f"{token}.{sender}{suffix}"


def sibling(name: str, sender: int) -> str:
    """Return the name of the same server's channel with another sender."""
    group, _, suffix = name.partition("@")
    token = group.rpartition(".")[0]
    return channel_name(token, sender, f"@{suffix}" if suffix else "")


def announce(senders: Sequence[Sequence[Description]]) -> Announcement:
    """Announce a key frame: the buckets of each sender. The senders take turns."""
    request = Announcement([], [], [])
    for turn in itertools.zip_longest(*senders):
        for number, bucket in enumerate(turn):
            if bucket is not None:
                request.names.extend([f"{_MARKER}{number}", *bucket.names])
                request.dtypes.extend([torch.uint8, *bucket.dtypes])
                request.shapes.extend([[bucket.num_bytes], *map(list, bucket.shapes)])
    return request


def announce_delta(base: int, num_senders: int) -> Announcement:
    """Announce a delta of version `base`."""
    return Announcement([bucket_name(base)], [torch.uint8], [[num_senders]])


def announce_in_place() -> Announcement:
    """Announce that the parameters hold the new weights already."""
    return Announcement([IN_PLACE], [torch.uint8], [[0]])


def is_key_frame(names: Sequence[str]) -> bool:
    """Return whether a request with these names announces a key frame."""
    return bool(names) and names[0].startswith(_MARKER)


def read_key_frame(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[Announced]:
    """Return the buckets that `announce` was given, in the order in which they come."""
    starts = [index for index, name in enumerate(names) if name.startswith(_MARKER)]
    return [
        Announced(
            int(names[start].removeprefix(_MARKER)),
            shapes[start][0],
            names[start + 1 : end],
            dtypes[start + 1 : end],
            shapes[start + 1 : end],
        )
        for start, end in itertools.pairwise([*starts, len(names)])
    ]
