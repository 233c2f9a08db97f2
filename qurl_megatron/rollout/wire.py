"""What travels over HTTP to a server that somebody started elsewhere, and what it says of itself.

`GET /qurl` gives a `Description`. `POST /qurl/weights` takes a bucket. Its body is

    header: one line of JSON, see `BucketHeader` | payload: the bucket's values, maybe compressed

and its answer is `{"success": ..., "message": ..., "load_s": ...}`, with the seconds that loading
took. `DELETE /qurl/run` ends the claim of the run that asks for it. All need the server's key.

A run names itself in the header `Qurl-Run` of each of its requests. A server serves one run at a
time, whose weights it has; the requests of others get status 409 (`sglang_plugin/door.py`).

In the server's processes, the values are a file. Instead of a process group, a request then names
the file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import pydantic
from annotated_types import Ge, Lt

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.text import from_tree

DESCRIPTION_PATH = "/qurl"
WEIGHTS_PATH = "/qurl/weights"
RUN_PATH = "/qurl/run"
RUN_HEADER = "Qurl-Run"
LARGEST_HEADER_BYTES = 2**28  # names and shapes of a bucket; what has more is no header
SHOWN_CHARACTERS = 500  # of what another machine has answered
_ANYTHING = pydantic.TypeAdapter(Any)
FILE_PREFIX = "file:"  # of a file's path in place of the name of a process group


@dataclasses.dataclass(frozen=True)
class BucketHeader:
    """The manifest of a bucket on its way, see `bucket.Manifest`, and what belongs to it."""

    names: Sequence[str]
    dtypes: Sequence[str]  # without "torch."
    shapes: Sequence[Sequence[int]]
    version: Annotated[int, Ge(0), Lt(10**18)]  # of the weights
    flush_cache: bool  # empty the cache of prefixes
    num_bytes: int  # of the values
    is_compressed: bool  # the payload is a stream of zlib

    def pack(self) -> bytes:
        """Return the line at the beginning of a body."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @staticmethod
    def unpack(line: bytes) -> BucketHeader:
        """Read a header.

        Raises:
            ValueError: it is no such header.
        """
        return from_tree(BucketHeader, read_json(line))


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
                f"quantization needs {needed.method or 'bf16'}; start it with the run's format and "
                "group_size"
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


def read_json(content: bytes) -> Any:
    """Return what the JSON of another machine says.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        return _ANYTHING.validate_json(content)
    except pydantic.ValidationError as error:
        raise ValueError(error.errors(include_input=False)[0]["msg"]) from None


def escaped(text: str) -> str:
    """Return the beginning of a text from elsewhere, on one line, control characters as escapes.

    What it would do to a terminal it then only says.
    """
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown
    )


def dtype_names(dtypes: Iterable[object]) -> list[str]:
    """Return the names of torch dtypes as SGLang's requests have them, such as "int8"."""
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]
