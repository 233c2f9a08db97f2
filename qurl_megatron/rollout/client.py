"""Sample completions from an SGLang server, or from a router in front of several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.rollout.router import Router
from qurl_megatron.rollout.server import Server


class RolloutClient:
    """Samples completions from a server, or through a router from several."""

    def __init__(self, server: Server | Router, tokenizer: Any, stop_token_ids: Sequence[int]):
        self._server = server
        self._tokenizer = tokenizer
        self._stop_token_ids = list(stop_token_ids)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        completions_per_prompt: int,
        temperature: float,
        max_response_length: int,
        top_p: float = 1.0,
        answered: Callable[[], None] = lambda: None,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of `prompts`.

        Args:
            temperature: sampling temperature; 0 decodes greedily.
            max_response_length: maximum number of sampled tokens.
            answered: called once for each prompt, when its completions are there.

        Raises:
            ServerFailed: a server died or refused a request.
        """
        sampling = {
            "n": completions_per_prompt,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_response_length,
            "stop_token_ids": self._stop_token_ids,
        }
        return asyncio.run(self._generate(prompts, sampling, answered))

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any], answered: Callable[[], None]
    ) -> list[list[Completion]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=None, limits=limits, headers=self._server.headers
        ) as client:

            async def ask(prompt: Prompt) -> list[Completion]:
                completions = await self._group(client, prompt, sampling)
                answered()
                return completions

            return await asyncio.gather(*map(ask, prompts))

    async def _group(
        self, client: httpx.AsyncClient, prompt: Prompt, sampling: dict[str, Any]
    ) -> list[Completion]:
        body = {
            "input_ids": prompt.token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        try:
            response = await client.post(f"{self._server.url}/generate", json=body)
        except httpx.TransportError as error:
            raise self._server.failed(f"closed the connection while sampling ({error!r})") from None
        if response.is_error:
            raise self._server.failed(f"refused a sampling request: {response.text}")
        answers = response.json()
        return [self._completion(a) for a in (answers if isinstance(answers, list) else [answers])]

    def _completion(self, answer: dict[str, Any]) -> Completion:
        meta = answer["meta_info"]
        token_ids = answer["output_ids"]
        return Completion(
            token_ids=token_ids,
            behaviour_logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            # SGLang also says "length" when the last allowed token is a stop token.
            truncated=meta["finish_reason"]["type"] == "length"
            and token_ids[-1] not in self._stop_token_ids,
            weight_version=int(meta["weight_version"]),
        )
