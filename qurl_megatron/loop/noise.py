"""How far a served policy is from the learner's before any training: engine and quantization apart.

Each server set answers the same prompts, and the learner scores what it sampled. What the BF16
servers of evaluation show is the engine's own noise; what those of the rollout show beyond it comes
of quantization.
"""

from __future__ import annotations

from qurl_megatron.algorithm.batch import Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.objective import rollout_statistics
from qurl_megatron.config.schema import Config
from qurl_megatron.device import from_rank_zero
from qurl_megatron.learner.learner import Learner
from qurl_megatron.rollout.client import RolloutClient


def measure_noise(
    clients: dict[str, RolloutClient],
    prompts: list[Prompt],
    learner: Learner,
    config: Config,
    pad_token_id: int,
) -> dict[str, dict[str, float]]:
    """`rollout_statistics` of one completion of each prompt, by server set.

    Collective over learner ranks; `clients` and `prompts` are used on global rank 0 only.
    """
    rollout = config.rollout

    def sample(client: RolloutClient) -> TrainBatch:
        answers = client.generate(
            prompts,
            completions_per_prompt=1,
            temperature=rollout.temperature,
            max_response_length=rollout.max_response_length,
        )
        nothing = [[0.0]] * len(prompts)
        groups = [
            RolloutGroup(prompt, answer, [0.0])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return pack(groups, nothing, nothing, pad_token_id)

    found = {}
    for name, client in clients.items():
        batch = from_rank_zero(lambda: sample(client))  # noqa: B023
        proximal_logprobs, _ = learner.logprobs_and_entropy(
            batch.tokens, loss_mask=batch.loss_mask, temperature=rollout.temperature
        )
        found[name] = rollout_statistics(
            proximal_logprobs,
            batch.behaviour_logprobs,
            batch.loss_mask,
            config.objective.ratio_cap,
        )
    return found
