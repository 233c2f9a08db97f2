"""Sample completions from the SGLang servers of a fleet."""

import asyncio
import contextlib
import socket
import weakref
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

import httpx
import torch

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.process import raise_open_file_limit
from qurl_megatron.rollout.fleet import AdmissionNeeded, Fleet, RequestRefused, ServerBusy
from qurl_megatron.rollout.server import POLL_S, Server, certificates

# Nothing is sent while a long answer is sampled. Routers forget a connection that is silent for
# minutes; neither side would be told.
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 30),
]


class RolloutClient:
    """Samples completions from a fleet of servers; a server that dies costs no completion."""

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        *,
        routing_shape: tuple[int, int] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            routing_shape: layers and experts per token, if the servers record routing.
        """
        self.fleet = fleet
        self._routing_shape = routing_shape
        self._tokenizer = tokenizer
        self._stop_token_ids = list(stop_token_ids)
        self._https: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        answered: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of `prompts`.

        Args:
            answered: called once for each prompt, when its completions are there.
            settings: of `sampling`.

        Raises:
            AdmissionNeeded: nothing can be sampled before servers get the current weights.
            FleetTooSmall: too few servers serve.
            RequestRefused: a server refused a request.
        """
        return asyncio.run(self._generate(prompts, self.sampling(**settings), answered))

    def sampling(
        self,
        *,
        completions_per_prompt: int,
        temperature: float,
        max_response_length: int,
        top_p: float = 1.0,
        top_k: int = -1,
    ) -> dict[str, Any]:
        """Return the settings of `group`, in SGLang's words.

        Args:
            temperature: sampling temperature; 0 decodes greedily.
            max_response_length: maximum number of sampled tokens.
            top_k: sample among this many tokens at the most; -1 for all. With it completions have
                `sampling_masks`, which SGLang records only of a limited number of tokens.
        """
        return {
            "n": completions_per_prompt,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_new_tokens": max_response_length,
            "stop_token_ids": self._stop_token_ids,
        }

    async def group(self, prompt: Prompt, sampling: dict[str, Any]) -> list[Completion]:
        """Return the completions of one prompt; see `complete`."""
        completions, _ = await self.complete(prompt.token_ids, sampling)
        return completions

    async def complete(
        self, token_ids: list[int], sampling: dict[str, Any], prefer: Server | None = None
    ) -> tuple[list[Completion], Server]:
        """Return what follows some tokens, and the server that sampled it.

        That is the one with the fewest tokens outstanding; see `Fleet.ask` for `prefer`. If it is
        lost, another answers all of the request. If none serves, this waits.

        Raises:
            FleetTooSmall: too few servers serve.
            RequestRefused: a server refused the request.
        """
        asked: list[Server] = []

        def post(server: Server) -> Awaitable[list[dict[str, Any]]]:
            asked.append(server)
            return self._post(body, server)

        body = {
            "input_ids": token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "return_routed_experts": self._routing_shape is not None,
            "return_sampling_mask": sampling["top_k"] > 0,
        }
        tokens = len(token_ids) + sampling["n"] * sampling["max_new_tokens"]
        answers = await self.fleet.ask(tokens, post, prefer)
        for answer in answers:
            ended, length = answer["meta_info"]["finish_reason"]["type"], len(answer["output_ids"])
            if ended == "length" and length < sampling["max_new_tokens"]:
                raise RequestRefused(
                    f"a server ended a response after {length} of {sampling['max_new_tokens']} "
                    "tokens: its KV cache holds no more; give it more memory, or lower "
                    "max_response_length"
                )
        return [self._completion(answer, len(token_ids)) for answer in answers], asked[-1]

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any], answered: Callable[[], None]
    ) -> list[list[Completion]]:
        async def ask(prompt: Prompt) -> list[Completion]:
            completions = await self.group(prompt, sampling)
            answered()
            return completions

        groups = asyncio.gather(*map(ask, prompts))
        while not groups.done():
            await asyncio.wait({groups}, timeout=POLL_S)
            if not groups.done() and self.fleet.needs_admission():
                groups.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await groups
                raise AdmissionNeeded
        return groups.result()

    async def _post(self, body: dict[str, Any], server: Server) -> list[dict[str, Any]]:
        """Return a server's answers to one request, one for each completion."""
        try:
            url = f"{server.url}/generate"
            response = await self._http().post(url, json=body, headers=server.headers)
        except httpx.TransportError as error:
            raise server.failed(f"closed the connection while sampling ({error!r})") from None
        status = response.status_code
        is_sglang = response.headers.get("Content-Type", "").startswith("application/json")
        if server.is_remote and (
            not is_sglang or status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.CONFLICT)
        ):
            # A proxy answers for a server that does not, or a server with another key is there, or
            # it serves another run.
            raise server.failed(f"answered a prompt with status {status}")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ServerBusy
        if response.is_error:
            raise RequestRefused(f"server {server.url} refused a prompt: {response.text}")
        answers = response.json()
        answers = answers if isinstance(answers, list) else [answers]
        if any(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers):
            raise ServerBusy  # the answer is not complete
        if server.is_remote and any(
            0 in answer["meta_info"]["token_versions"] for answer in answers
        ):
            # Nothing else tells the run, as a roster does of a server that its launcher restarts.
            raise server.failed("was started again, and answered without weights")
        return answers

    def _http(self) -> httpx.AsyncClient:
        """Return this event loop's connections; a loop that has ended leaves none open."""
        loop = asyncio.get_running_loop()
        if loop not in self._https:
            # A prompt takes a connection, which is an open file. Those over the limit wait.
            most = raise_open_file_limit() // 2
            limits = httpx.Limits(max_connections=most, max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(
                limits=limits, socket_options=KEEP_ALIVE, verify=certificates()
            )
            self._https[loop] = httpx.AsyncClient(timeout=None, transport=transport)
        return self._https[loop]

    def _completion(self, answer: dict[str, Any], prompt_length: int) -> Completion:
        meta = answer["meta_info"]
        token_ids = answer["output_ids"]
        routed_experts = None
        if self._routing_shape is not None:
            numbers = bytearray(b64decode(meta["routed_experts"]))
            shape = (prompt_length + len(token_ids) - 1, *self._routing_shape)
            routed_experts = (
                torch.frombuffer(numbers, dtype=torch.int32).view(shape).to(torch.int16)
            )
        return Completion(
            token_ids=token_ids,
            behaviour_logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            # SGLang also says "length" when the last allowed token is a stop token.
            truncated=meta["finish_reason"]["type"] == "length"
            and token_ids[-1] not in self._stop_token_ids,
            token_versions=meta["token_versions"],
            routed_experts=routed_experts,
            sampling_masks=meta.get("output_token_sampling_mask"),
            cached_tokens=meta.get("cached_tokens", 0),
        )
