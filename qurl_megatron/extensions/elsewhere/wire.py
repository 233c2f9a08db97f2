"""The HTTP messages of a server that somebody started elsewhere: buckets and its description.

`GET /qurl` gives a `Description`. `POST /qurl/weights` takes a bucket. Its body is

    header: one line of JSON, see `BucketHeader` | payload: the bucket's values, maybe compressed

and its answer is `{"success": ..., "message": ..., "load_s": ...}`, with the seconds that loading
took. `DELETE /qurl/run` ends the claim of the run that sends it. All routes need the server's key.

A server serves one run at a time, and holds this run's weights (`sglang_plugin/access.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Lt

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.text import from_tree
from qurl_megatron.config.values import CountOrZero
from qurl_megatron.rollout.wire import read_json


@dataclasses.dataclass(frozen=True)
class BucketHeader:
    """The manifest of a bucket (see `bucket.Manifest`), and how to read and load its values."""

    names: Sequence[str]
    dtypes: Sequence[str]  # without "torch."
    shapes: Sequence[Sequence[int]]
    version: Annotated[int, Ge(0), Lt(10**18)]  # of the weights
    flush_cache: bool  # empty the cache of prefixes
    num_bytes: CountOrZero  # of the values, uncompressed
    is_compressed: bool  # the payload is a zlib stream

    def pack(self) -> bytes:
        """Return the line at the beginning of a body."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @staticmethod
    def unpack(line: bytes) -> BucketHeader:
        """Read a header.

        Raises:
            ValueError: the line is not a header.
        """
        return from_tree(BucketHeader, read_json(line))


@dataclasses.dataclass(frozen=True)
class Description:
    """The properties in which a server must match the run that uses it."""

    version: str  # of qurl-megatron
    method: str | None  # SGLang's name of the weight format, as in `quantize.ENGINE_METHODS`
    context_length: int  # maximum prompt plus completion length, in tokens
    model: dict[str, Any]  # the fields of its `Architecture`
    kept: list[str]  # layers in BF16, as `keep.layers_of` returns them
    records_routing: bool  # answers list the experts that the router chose
    run: str = ""  # name of the run that it serves; empty: none

    def check(self, url: str, needed: Description) -> None:
        """Check that the server at `url` can sample for a run that needs the other description.

        Raises:
            ConfigError: it cannot; the message names the first difference.
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
                f"quantization needs {needed.method or 'bf16'}; start it with the run's format and "
                "group_size"
            )
        if self.context_length < needed.context_length:
            raise ConfigError(
                f"{server} serves at most {self.context_length} tokens of prompt plus completion; "
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
