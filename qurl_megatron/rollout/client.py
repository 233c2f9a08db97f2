"""Sample completions from the SGLang servers of a fleet.

A completion is one answer, or what takes its place: an agent's episode (`extensions/agents`).
"""

import asyncio
import itertools
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import aiohttp
import pydantic
import torch

from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, SamplingMasks
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import SamplingConfig
from qurl_megatron.config.values import CountOrZero, Finite
from qurl_megatron.machine.processes import raise_open_file_limit
from qurl_megatron.rollout.controller import end
from qurl_megatron.rollout.fleet import AdmissionNeeded, Fleet, RequestRefused, ServerBusy
from qurl_megatron.rollout.requests import LARGEST_ANSWER_BYTES, connect
from qurl_megatron.rollout.server import POLL_S, Server

T = TypeVar("T")

# The largest sizes of parts of an answer's JSON.
TOKEN_BYTES = 2**10  # a token's id, log-prob and version
EXPERT_BYTES = 6  # the number of an expert in base64
MASK_ID_BYTES = 2**4  # a token of a sampling mask

LARGEST_MASK = 512
"""A token with a sampling mask is drawn from at most this many tokens: SGLang records no mask
without a limit."""


@dataclass(frozen=True)
class _End:
    type: str


# Only the numbers are kept: with a tuple of each token, Python's collector would visit these most.
_Logprobs = Annotated[
    list[float],
    pydantic.ValidateAs(
        list[tuple[Finite, Any, Any]], lambda entries: [logprob for logprob, *_ in entries]
    ),
]


def _masks(of_tokens: list[list[int]]) -> SamplingMasks:
    sizes = torch.tensor([len(ids) for ids in of_tokens], dtype=torch.int32)
    token_ids = list(itertools.chain.from_iterable(of_tokens))
    return SamplingMasks(sizes, torch.tensor(token_ids, dtype=torch.int32))


_Masks = Annotated[SamplingMasks, pydantic.ValidateAs(list[list[CountOrZero]], _masks)]


@dataclass(frozen=True)
class _Meta:
    finish_reason: _End
    token_versions: list[CountOrZero] = field(default_factory=list)
    output_token_logprobs: _Logprobs = field(default_factory=list)
    routed_experts: str | None = None
    output_token_sampling_mask: _Masks | None = None
    output_token_sampling_logprobs: list[Finite] = field(default_factory=list)
    cached_tokens: CountOrZero = 0


@dataclass(frozen=True)
class _Sampled:
    """A server's record of one completion; of an aborted one it may leave out most fields."""

    output_ids: list[CountOrZero]
    meta_info: _Meta


_SAMPLED: pydantic.TypeAdapter[_Sampled | list[_Sampled]] = pydantic.TypeAdapter(
    Annotated[_Sampled | list[_Sampled], pydantic.Field(union_mode="left_to_right")]
)


class RolloutClient:
    """Samples completions from a fleet of servers, and loses none when a server dies."""

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
            routing_shape: (layers, experts per token) if the servers record routing.
        """
        self.fleet = fleet
        self._routing_shape = routing_shape
        self._tokenizer = tokenizer
        self.stop_token_ids = list(stop_token_ids)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        answered: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of `prompts`.

        Args:
            answered: called once for each prompt, when its completions have arrived.
            settings: the arguments of `sampling`.

        Raises:
            AdmissionNeeded: nothing can be sampled before servers get the current weights.
            FleetTooSmall: too few servers serve.
            RequestRefused: a server refused a request.
        """
        sampling = self.sampling(**settings)

        async def ask(prompt: Prompt) -> list[Completion]:
            completions = await self.group(prompt, sampling)
            answered()
            return completions

        return self.gather(map(ask, prompts))

    def gather(self, answers: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results of `answers`, in order; raise what `generate` raises."""
        return self.fleet.controller.wait(self._gather(answers))

    def sampling(
        self,
        *,
        completions_per_prompt: int,
        temperature: float,
        max_completion_length: int,
        top_p: float = 1.0,
        records_masks: bool = False,
    ) -> dict[str, Any]:
        """Return the settings of `group`, which are SGLang's `sampling_params`.

        Args:
            temperature: sampling temperature; 0 decodes greedily.
            max_completion_length: maximum number of sampled tokens.
            records_masks: completions get `sampling_masks`, and log-probs over these. Each token
                is then drawn from at most the `LARGEST_MASK` likeliest tokens.
        """
        return {
            "n": completions_per_prompt,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": LARGEST_MASK if records_masks else -1,
            "max_new_tokens": max_completion_length,
            "stop_token_ids": self.stop_token_ids,
        }

    def ends(self) -> list[tuple[int, str]]:
        """Return the ids and texts of the tokens that end a completion."""
        texts = self._tokenizer.convert_ids_to_tokens(self.stop_token_ids)
        return list(zip(self.stop_token_ids, texts, strict=True))

    async def group(self, prompt: Prompt, sampling: dict[str, Any]) -> list[Completion]:
        """Return the completions of one prompt; see `complete`."""
        completions, _ = await self.complete(prompt.token_ids, sampling)
        return completions

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return the fields of `StepMetrics` that only such completions have; answers have none."""
        return {}

    async def complete(
        self, token_ids: list[int], sampling: dict[str, Any], prefer: Server | None = None
    ) -> tuple[list[Completion], Server]:
        """Return completions of `token_ids`, and the server that sampled them.

        It is the server with the fewest tokens outstanding; see `Fleet.ask` for `prefer`. If it is
        lost, another answers all of the request. If no server serves, this waits.

        Raises:
            FleetTooSmall: too few servers serve.
            RequestRefused: a server refused the request, or its KV cache was too small.
        """
        asked: list[Server] = []

        def post(server: Server) -> Awaitable[list[_Sampled]]:
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
            ended, length = answer.meta_info.finish_reason.type, len(answer.output_ids)
            if ended == "length" and length < sampling["max_new_tokens"]:
                raise RequestRefused(
                    f"a server ended a completion after {length} of {sampling['max_new_tokens']} "
                    "tokens: its KV cache holds no more; give it more memory, or lower "
                    "max_completion_length"
                )
        return [self._completion(answer, len(token_ids)) for answer in answers], asked[-1]

    async def _gather(self, answers: Iterable[Awaitable[T]]) -> list[T]:
        tasks = [asyncio.ensure_future(answer) for answer in answers]
        gathered = asyncio.gather(*tasks)
        try:
            while not gathered.done():
                await asyncio.wait({gathered}, timeout=POLL_S)
                if not gathered.done() and self.fleet.needs_admission():
                    raise AdmissionNeeded
            return gathered.result()
        finally:
            await end([gathered, *tasks])

    async def _post(self, body: dict[str, Any], server: Server) -> list[_Sampled]:
        """Return a server's answers to one request, one for each completion."""
        answer = await server.request(
            "POST",
            "/generate",
            json=body,
            timeout_s=None,
            most_bytes=self._most_bytes(body),
            connector=self._connector,
        )
        status = answer.status
        if server.is_remote and (
            not answer.is_json or status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.CONFLICT)
        ):
            # A proxy answers in place of the server, or the server has another key (401) or serves
            # another run (409).
            raise server.failed(f"answered a prompt with status {status}")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ServerBusy
        if not answer.is_success:
            raise RequestRefused(f"server {server.url} refused a prompt: {answer.text}")
        try:
            sampled = _SAMPLED.validate_json(answer.content)
            answers = sampled if isinstance(sampled, list) else [sampled]
            if any(each.meta_info.finish_reason.type == "abort" for each in answers):
                raise ServerBusy  # the answer is not complete
            are_whole = len(answers) == body["sampling_params"]["n"]
            are_whole &= all(self._is_whole(each, body) for each in answers)
        except ValueError:
            are_whole = False
        if not are_whole:
            what = f"answered a prompt with unexpected content: {answer.text}"
            if server.is_remote:
                raise server.failed(what)
            raise RequestRefused(f"server {server.url} {what}")  # so would another server
        if server.is_remote and any(0 in each.meta_info.token_versions for each in answers):
            # No roster tells the run that a server elsewhere was started again.
            raise server.failed("was started again, and answered without weights")
        return answers

    def _most_bytes(self, body: dict[str, Any]) -> int:
        """Return the largest size of the answer to a request, in bytes."""
        sampling = body["sampling_params"]
        layers, experts = self._routing_shape or (0, 0)
        of_token = TOKEN_BYTES + layers * experts * EXPERT_BYTES
        of_token += max(0, sampling["top_k"]) * MASK_ID_BYTES
        # The experts of the prompt's tokens are in the answer too.
        tokens = len(body["input_ids"]) + sampling["max_new_tokens"]
        num_bytes: int = sampling["n"] * tokens * of_token
        return LARGEST_ANSWER_BYTES + num_bytes

    def _is_whole(self, answer: _Sampled, body: dict[str, Any]) -> bool:
        """Return whether an answer has what was asked for: a completion, and values of each token.

        Raises:
            ValueError: the experts are no base64.
        """
        sampling = body["sampling_params"]
        meta, length = answer.meta_info, len(answer.output_ids)
        per_token: list[Sequence[Any]] = [meta.token_versions, meta.output_token_logprobs]
        masks = meta.output_token_sampling_mask
        if (masks is not None) != (sampling["top_k"] > 0):
            return False
        if masks is not None:
            per_token += [masks.sizes.tolist(), meta.output_token_sampling_logprobs]
        if not 0 < length <= sampling["max_new_tokens"]:
            return False
        if any(len(values) != length for values in per_token):
            return False
        if masks is not None:
            # Each mask has its own token, exactly once.
            drawn = torch.tensor(answer.output_ids).repeat_interleave(masks.sizes)
            if int((drawn == masks.token_ids).sum()) != length:
                return False
        if self._routing_shape is None:
            return True
        layers, experts = self._routing_shape
        read = len(body["input_ids"]) + length - 1  # the model does not read the last one
        numbers = b64decode(meta.routed_experts or "", validate=True)
        return len(numbers) == read * layers * experts * torch.int32.itemsize

    @cached_property
    def _connector(self) -> aiohttp.TCPConnector:
        """The connector of all prompts, in the controller's loop."""
        # Each prompt takes a connection, which is an open file. Prompts over the limit wait.
        return connect(raise_open_file_limit() // 2)

    def _completion(self, answer: _Sampled, prompt_length: int) -> Completion:
        meta = answer.meta_info
        token_ids = answer.output_ids
        routed_experts = None
        if self._routing_shape is not None:
            numbers = bytearray(b64decode(meta.routed_experts or ""))
            shape = (prompt_length + len(token_ids) - 1, *self._routing_shape)
            routed_experts = (
                torch.frombuffer(numbers, dtype=torch.int32).view(shape).to(torch.int16)
            )
        return Completion(
            token_ids=token_ids,
            behaviour_logprobs=meta.output_token_logprobs
            if meta.output_token_sampling_mask is None
            else meta.output_token_sampling_logprobs,
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            # SGLang also says "length" when the last allowed token is a stop token.
            truncated=meta.finish_reason.type == "length"
            and token_ids[-1] not in self.stop_token_ids,
            token_versions=meta.token_versions,
            routed_experts=routed_experts,
            sampling_masks=meta.output_token_sampling_mask,
            cached_tokens=meta.cached_tokens,
        )


@contextmanager
def client_type(
    config: SamplingConfig,
    model: str | Path,
    template: tuple[Mapping[str, Any], str, str],
    reward_wrong: float,
    logs: Path,
) -> Iterator[Callable[..., RolloutClient]]:
    """Yield what makes clients whose completions are answers or, with an `agent`, its episodes.

    Args:
        model, template: of the tokenizer; see `load_tokenizer`.
        reward_wrong: the reward of an episode that fails.
        logs: directory for what agents print.
    """
    if not config.agent:
        yield RolloutClient
        return
    agents = needed("agents", "client", by=f"agent={config.agent}")
    with agents.Agents(config, model, template, logs) as playing:
        yield partial(agents.AgentClient, playing, reward_wrong)
