"""SGLang's models behind SGLang's own receiver of weights, in processes without HTTP.

Each process has one tensor-parallel rank of a server and does what a scheduler does in a publish. A
`Server` in a learner's process reaches it by a pipe, once `connect` has patched it.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import sglang_loader
from qurl_megatron.rollout.server import Server, UpdateRefused

REFUSED = "it was told to refuse"


@contextmanager
def serving(ranks: Sequence[Any]) -> Iterator[list[Connection]]:
    """Yield a pipe to a process for each of a server's models, which they inherit."""
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        pipes = []
        for rank, model in enumerate(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, model, rank, len(ranks)), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            pipes.append(ours)
        yield pipes


def serve(pipe: Connection, model: Any, rank: int, size: int) -> None:
    """Answer requests until the process is killed."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    from qurl_megatron.sglang_plugin import weights

    init = weight_updater.init_custom_process_group
    weight_updater.init_custom_process_group = partial(weights.join_group, init)  # type: ignore[assignment]
    nothing: Any = None
    updater = weight_updater.WeightUpdater(
        tp_rank=rank,
        device="cpu",
        gpu_id=0,
        model_config=nothing,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=nothing,
        recapture_cuda_graph=nothing,
        get_model_runner=nothing,
    )
    checker = sglang_loader.checker_of(model)
    checks = {
        "checksum": lambda: weights.compute_checksum(checker, role="target"),
        "parameters": lambda: weights.handle(nothing, checker, "parameters", role="target"),
    }
    dies = False
    with sglang_loader.as_rank(rank, size):
        while True:
            path, body = pipe.recv()
            answer: Any = (True, "")
            if path == "/init_weights_update_group":
                answer = updater.init_weights_update_group(**body)
            elif path == "/weights_checker":
                answer = (True, checks[body["action"]]())
            elif path == "/die_in_the_next_update":
                dies = True
            elif path == "/update_weights_from_distributed":
                if dies:
                    return
                if body["names"] != ["written in place"]:
                    announced = {key: body[key] for key in ("names", "dtypes", "shapes")}
                    try:
                        weights.receive(
                            nothing, updater, **announced, group_name=body["group_name"]
                        )
                    except Exception as error:
                        answer = (False, repr(error))
            pipe.send(answer)


def connect(pipes: Mapping[str, Sequence[Connection]]) -> None:
    """Have every `Server` of this process use the pipes to the server of its URL."""

    async def post(server: Server, path: str, body: dict[str, Any], **_: Any) -> Any:
        try:
            for pipe in pipes[server.url]:
                pipe.send((path, body))
            answers = [await asyncio.to_thread(pipe.recv) for pipe in pipes[server.url]]
        except (EOFError, OSError) as error:
            raise server.failed(f"closed the connection in {path} ({error!r})") from None
        for succeeded, message in answers:
            if not succeeded:
                raise UpdateRefused(str(server.failed(f"refused {path}: {message}")))
        ranks = [answer for _, answer in answers]
        if path == "/weights_checker":
            return {"ranks": ranks}
        return {"success": True}

    setattr(Server, "_post", post)  # noqa: B010
