"""What travels over HTTP to a server that somebody started elsewhere, and what it says of itself.

`GET /qurl` gives a `Description`. `POST /qurl/weights` takes a bucket. Its body is

    | bytes of the header: int64, little-endian | header: JSON of `BucketHeader` | payload |

and its answer is `{"success": ..., "message": ..., "load_s": ...}`, with the seconds that loading
took. `DELETE /qurl/run` ends the claim of the run that asks for it. All need the server's key. A
server without a key has none of them.

A run names itself in the header `Qurl-Run` of each of its requests. A server serves one run at a
time, whose weights it has; the requests of others get status 409.

In the server's processes, the payload is a file. Instead of a process group, a request then names
the file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from qurl_megatron.config.schema import ConfigError

DESCRIPTION_PATH = "/qurl"
WEIGHTS_PATH = "/qurl/weights"
RUN_PATH = "/qurl/run"
RUN_HEADER = "Qurl-Run"
PREFIX_BYTES = 8
LARGEST_HEADER_BYTES = 2**28  # names and shapes of a bucket; what claims more is no header

# The payload is a bucket's buffer, or a delta's coded one.
Coding = Literal["plain", "rice"]
GROUP_OF_FILE: dict[Coding, str] = {"plain": "file:", "rice": "rice-file:"}


@dataclasses.dataclass(frozen=True)
class BucketHeader:
    """The description of a bucket on its way; see `bucket.Bucket`."""

    names: Sequence[str]
    dtypes: Sequence[str]  # without "torch."
    shapes: Sequence[Sequence[int]]
    version: int  # of the weights
    flush_cache: bool  # empty the cache of prefixes
    coding: Coding
    num_bytes: int  # of the payload

    def pack(self) -> bytes:
        """Return the prefix and the header of a body."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        return len(text).to_bytes(PREFIX_BYTES, "little") + text

    @staticmethod
    def unpack(text: bytes) -> BucketHeader:
        """Read a header.

        Raises:
            ValueError: it is no such header.
        """
        try:
            header = BucketHeader(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None
        if header.coding not in GROUP_OF_FILE:
            raise ValueError(f"no such coding: {header.coding}")
        return header


def header_bytes(prefix: bytes) -> int:
    """Return the size of the header behind a prefix.

    Raises:
        ValueError: no header is that large.
    """
    size = int.from_bytes(prefix, "little")
    if size > LARGEST_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
    return size


def group_of_file(path: str, coding: Coding) -> str:
    """Return what a request names in place of a process group."""
    return GROUP_OF_FILE[coding] + path


def file_of_group(group_name: str) -> tuple[str, Coding] | None:
    """Return the file that `group_of_file` was given; None for a process group."""
    for coding, prefix in GROUP_OF_FILE.items():
        if group_name.startswith(prefix):
            return group_name.removeprefix(prefix), coding
    return None


@dataclasses.dataclass(frozen=True)
class Description:
    """What a server must have in common with the run that uses it."""

    version: str  # of qurl-megatron
    method: str | None  # SGLang's name of the weight format, as in `quantize.ENGINE_METHODS`
    context_length: int  # maximum prompt plus response length, in tokens
    model: dict[str, Any]  # the fields of its `Architecture`
    kept: list[str]  # layers in BF16, as `keep.kept_layers` returns them
    records_routing: bool  # answers with the experts that were chosen
    run: str = ""  # that it serves, as the run names itself; empty: none

    def check(self, url: str, needed: Description) -> None:
        """Check that the server at `url` can sample for a run that needs the other description.

        Raises:
            ConfigError: it cannot; the message names the first thing that differs.
        """
        server = f"rollout.servers_at: the server at {url}"
        if self.run not in ("", needed.run):
            raise ConfigError(
                f"{server} serves the run {self.run}; give each run servers of its own, or start "
                "this one again if that run has ended"
            )
        if self.version != needed.version:
            raise ConfigError(
                f"{server} runs qurl-megatron {self.version}, and this is {needed.version}; "
                "install the same version on both machines"
            )
        for field, value in needed.model.items():
            if self.model.get(field) != value:
                raise ConfigError(
                    f"{server} has a model whose {field} is {self.model.get(field)}; that of the "
                    f"run is {value}; start it with the run's model"
                )
        if self.method != needed.method:
            raise ConfigError(
                f"{server} takes weights as {self.method or 'bf16'}; the run's "
                f"quantization.format needs {needed.method or 'bf16'}; start it with that format"
            )
        if self.context_length < needed.context_length:
            raise ConfigError(
                f"{server} serves at most {self.context_length} tokens of prompt plus response; "
                f"the run needs {needed.context_length}; start it with "
                f"max_length={needed.context_length}"
            )
        if self.kept != needed.kept:
            differs = sorted({*self.kept} ^ {*needed.kept})[0]
            raise ConfigError(
                f"{server} and the run do not keep the same layers in BF16: one keeps {differs}; "
                "start it with the run's quantization.keep as keep"
            )
        if needed.records_routing and not self.records_routing:
            raise ConfigError(
                f"{server} does not record the experts that rollout.routing needs; start it with "
                "records_routing=true"
            )


def dtype_names(dtypes: Iterable[object]) -> list[str]:
    """Return the names of torch dtypes as SGLang's requests have them, such as "int8"."""
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]
