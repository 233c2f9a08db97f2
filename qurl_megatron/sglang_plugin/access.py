"""Access to a server: which requests reach SGLang's routes, from which run, with which bodies.

SGLang has over a hundred routes, and each release adds some. `ROUTES` lists the routes that a
run, or SGLang itself, asks for. All others are closed: they answer with status 404. SGLang's own
check comes first: it requires the key, except for /health, /ready and /metrics.

A server serves one run: the weights of a second one would silently replace those of the first. A
run names itself in the header `Qurl-Run`. A request that changes the server needs that name. The
first run that gives its name has the claim, and all others are refused. If a run asks for nothing
for `CLAIM_S`, it has ended without saying so, and its claim ends.

A body is read whole, has a largest size, and must match the schema of its route. What it says about
weights must fit the model: names, dtypes and shapes (`bucket.check_manifest`).
"""

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Ge, Le, Len
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketClose

from qurl_megatron.config.values import CountOrZero, Finite, Ranks, Sequences, TopP, matching
from qurl_megatron.rollout.wire import (
    DESCRIPTION_PATH,
    LARGEST_HEADER_BYTES,
    RUN_HEADER,
    RUN_PATH,
    WEIGHTS_PATH,
    escaped,
)
from qurl_megatron.weight_sync.bucket import SentTensor, check_manifest

# The learner's part of a step, in which it asks for nothing, must be shorter.
CLAIM_S = 3600.0

Application = Callable[..., Coroutine[Any, Any, None]]
# A process group's name: neither a file nor a URL.
GroupName = Annotated[
    str, matching(r"[\w-]{0,64}(\.[0-9]{1,4})?", "a group's name has letters, digits and _ - only")
]
Host = Annotated[str, matching(r"[\w.:-]{1,253}", "give an address or a hostname")]
Version = Annotated[str, matching(r"[0-9]{1,18}", "a version is a number")]
Token = Annotated[int, Ge(0), Le(2**31)]


class Body(pydantic.BaseModel):
    """A JSON body, which must have no other fields."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class Empty(Body):
    """A body without fields."""


class Pause(Body):
    """Stop sampling; see `Server.pause`."""

    mode: Literal["retract", "in_place"]


class JoinGroup(Body):
    """Join a process group that carries weights."""

    master_address: Host
    master_port: Annotated[int, Ge(1), Le(65535)]
    world_size: Ranks
    rank_offset: Literal[1]
    group_name: GroupName
    backend: Literal["gloo", "nccl"]


class UpdateWeights(Body):
    """Load the weights that arrive through a process group."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: GroupName
    load_format: Literal["flattened_bucket"]
    weight_version: Version
    flush_cache: bool


class Memory(Body):
    """Give back, or take again, the memory of these tags."""

    tags: Annotated[list[Literal["kv_cache", "cuda_graph", "weights"]], Len(1, 3)]


class CheckWeights(Body):
    """Return checksums, or hand out parameters."""

    action: Literal["checksum", "parameters"]


class Sampling(Body):
    """How to sample a request's tokens."""

    n: Sequences = 1
    temperature: Annotated[Finite, Ge(0)] = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Ge(-1)] = -1
    max_new_tokens: CountOrZero
    stop_token_ids: list[Token] = []
    ignore_eos: bool = False


class Generate(Body):
    """Sample completions of one prompt, or of several."""

    input_ids: Annotated[list[Token], Len(1)] | list[Annotated[list[Token], Len(1)]]
    sampling_params: Sampling
    return_logprob: bool = False
    return_routed_experts: bool = False
    return_sampling_mask: bool = False


@dataclass(frozen=True)
class Route:
    """Which requests a route takes, and with which body."""

    changes: bool = False  # the server or its weights: only the run with the claim may ask
    claims: bool = True  # a run that asks for it claims the server, if it names itself
    body: type[Body] | None = None  # None: the route reads it itself, or has none


ROUTES = {
    ("GET", "/health"): Route(claims=False),
    ("GET", "/metrics"): Route(claims=False),  # with `enable_metrics`
    # SGLang asks itself for these, and benchmarks for the second.
    ("GET", "/model_info"): Route(),
    ("GET", "/server_info"): Route(),
    ("POST", "/freeze_gc"): Route(),
    ("GET", DESCRIPTION_PATH): Route(claims=False),
    ("DELETE", RUN_PATH): Route(claims=False),  # does nothing without the claim
    ("POST", "/generate"): Route(body=Generate),  # SGLang warms itself up, for no run
    ("POST", "/pause_generation"): Route(changes=True, body=Pause),
    ("POST", "/continue_generation"): Route(changes=True, body=Empty),
    ("POST", "/release_memory_occupation"): Route(changes=True, body=Memory),
    ("POST", "/resume_memory_occupation"): Route(changes=True, body=Memory),
    ("POST", "/init_weights_update_group"): Route(changes=True, body=JoinGroup),
    ("POST", "/update_weights_from_distributed"): Route(changes=True, body=UpdateWeights),
    ("POST", "/weights_checker"): Route(changes=True, body=CheckWeights),  # hands out parameters
    ("POST", WEIGHTS_PATH): Route(changes=True),
}


class AccessControl:
    """Lets in the requests of one run, and knows which run that is."""

    def __init__(self, held: Callable[[], Mapping[str, SentTensor]]) -> None:
        """Serve no run yet; `held` returns the tensors that the server takes, by name."""
        self._held = held
        self._run = ""
        self._num_running = 0  # requests of the run
        self._heard_at = 0.0  # when its last one ended, by the monotonic clock

    @property
    def run(self) -> str:
        """The run that the server serves: the one that asked last, unless that was long ago."""
        silent_s = time.monotonic() - self._heard_at
        return self._run if self._num_running or silent_s < CLAIM_S else ""

    def release(self, run: str) -> None:
        """End the claim of this run; do nothing if another run has it."""
        if self._run == run:
            self._run = ""

    def guard(self, app: Application) -> Application:
        """Return an ASGI application that passes only admitted requests to `app`."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "websocket":
                await WebSocketClose()(scope, receive, send)
                return
            if scope["type"] != "http":  # the application's start and end
                await app(scope, receive, send)
                return
            route = ROUTES.get((scope["method"], scope["path"]))
            run = Headers(scope=scope).get(RUN_HEADER, "") if route and route.claims else ""
            if route is None:
                await _refuse(404, "no run needs this route, so it is closed")(scope, receive, send)
            elif route.changes and not run:
                await _refuse(400, f"it needs the name of a run in {RUN_HEADER}")(
                    scope, receive, send
                )
            elif run and self.run not in ("", run):
                await _refuse(409, f"it serves the run {self.run}")(scope, receive, send)
            elif run:
                self._run = run
                self._num_running += 1
                try:
                    await self._check(app, route, scope, receive, send)
                finally:
                    self._num_running -= 1
                    self._heard_at = time.monotonic()
            else:
                await self._check(app, route, scope, receive, send)

        return answer

    async def _check(
        self, app: Application, route: Route, scope: Any, receive: Any, send: Any
    ) -> None:
        """Give `app` the request if its body matches the schema of the route."""
        if route.body is None:
            await app(scope, receive, send)
            return
        content = bytearray()
        try:
            async for chunk in Request(scope, receive).stream():
                content += chunk
                if len(content) > LARGEST_HEADER_BYTES:
                    raise ValueError(f"a body of more than {LARGEST_HEADER_BYTES} bytes")
            body = route.body.model_validate_json(bytes(content))
            if isinstance(body, UpdateWeights):
                check_manifest(body.names, body.dtypes, body.shapes, self._held())
        except ClientDisconnect:
            return
        except ValueError as error:
            await _refuse(400, reason(error))(scope, receive, send)
            return
        is_read = False

        async def replay() -> Any:
            nonlocal is_read
            if is_read:
                return await receive()  # a message that the client has gone
            is_read = True
            return {"type": "http.request", "body": bytes(content), "more_body": False}

        await app(scope, replay, send)


def reason(error: ValueError) -> str:
    """Return on one line what is wrong with a request, without repeating its content."""
    if not isinstance(error, pydantic.ValidationError):
        return escaped(str(error))
    first = error.errors(include_input=False, include_url=False)[0]
    return escaped(": ".join([".".join(map(str, first["loc"])), first["msg"]]))


def _refuse(status: int, message: str) -> JSONResponse:
    return JSONResponse({"success": False, "message": message}, status_code=status)
