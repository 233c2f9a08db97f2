"""Measure the train-inference mismatch before training, by its two causes.

Each server set answers the same prompts, and the learner scores the sampled tokens. The BF16
evaluation servers show the noise of the engine alone. Any larger mismatch of the rollout servers
comes from quantization.
"""

from __future__ import annotations

from torch import Tensor

from qurl_megatron.algorithm.batch import Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.objective import mismatch_sums, rollout_statistics
from qurl_megatron.config.schema import Config
from qurl_megatron.learner.learner import Learner
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.weight_sync.publish import Publisher


def measure_mismatch(
    clients: dict[str, RolloutClient],
    publishers: dict[str, Publisher],
    prompts: list[Prompt],
    learner: Learner,
    config: Config,
) -> dict[str, dict[str, float]]:
    """Return, by server set, the `rollout_statistics` of one completion of each prompt.

    Collective over learner ranks; `clients` and `prompts` are used on global rank 0 only. The
    servers of each set hold the weights that its publisher sent last.
    """
    rollout = config.rollout

    def sample(client: RolloutClient) -> TrainBatch:
        completions = client.generate(
            prompts,
            completions_per_prompt=1,
            temperature=rollout.temperature,
            max_response_length=rollout.max_response_length,
        )
        groups = [
            RolloutGroup(prompt, group, [0.0])
            for prompt, group in zip(prompts, completions, strict=True)
        ]
        return pack(groups).only("behaviour_logprobs")

    def mismatch(rows: TrainBatch) -> dict[str, Tensor]:
        assert rows.proximal_logprobs is not None and rows.behaviour_logprobs is not None
        return mismatch_sums(
            rows.proximal_logprobs,
            rows.behaviour_logprobs,
            rows.loss_mask,
            config.objective.ratio_cap,
        )

    measured = {}
    for name, client in clients.items():
        batches = [TrainBatch.empty()]
        publishers[name].while_serving(lambda: batches.append(sample(client)))  # noqa: B023
        share = learner.share(batches[-1])
        learner.score(share, ["proximal_logprobs"], temperature=rollout.temperature)
        measured[name] = rollout_statistics(learner.measure(share, mismatch))
    return measured
