"""Sample completions from an SGLang server, or from a router in front of several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
        # Every request has a connection of its own: a server closes idle ones at any moment.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, limits=limits, headers=server.headers)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        completions_per_prompt: int,
        temperature: float,
        max_response_length: int,
        top_p: float = 1.0,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of `prompts`.

        Args:
            temperature: sampling temperature; 0 decodes greedily.
            max_response_length: maximum number of sampled tokens.

        Raises:
            ServerFailed: a server died or refused a request.
        """
        sampling = self.sampling(
            completions_per_prompt=completions_per_prompt,
            temperature=temperature,
            max_response_length=max_response_length,
            top_p=top_p,
        )
        return asyncio.run(self._generate(prompts, sampling))

    def sampling(
        self,
        *,
        completions_per_prompt: int,
        temperature: float,
        max_response_length: int,
        top_p: float = 1.0,
    ) -> dict[str, Any]:
        """Return the settings of `group`, in SGLang's words."""
        return {
            "n": completions_per_prompt,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_response_length,
            "stop_token_ids": self._stop_token_ids,
        }

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any]
    ) -> list[list[Completion]]:
        return await asyncio.gather(*(self.group(prompt, sampling) for prompt in prompts))

    async def group(self, prompt: Prompt, sampling: dict[str, Any]) -> list[Completion]:
        """Return the completions of one prompt.

        Raises:
            ServerFailed: a server died or refused the request.
        """
        body = {
            "input_ids": prompt.token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        try:
            response = await self._http.post(f"{self._server.url}/generate", json=body)
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
            token_versions=meta["token_versions"],
        )
