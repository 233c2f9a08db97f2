"""A run proves its rollouts: it compares the servers' log-probs with those of the learner.

It measures the train-inference mismatch before the first step, after a resume, and before it trains
on samples of a new server. The run ends there if the weights' format does not explain the mismatch,
as the learner finds by computing as the servers do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.objective import mismatch_sums, rollout_statistics
from qurl_megatron.algorithm.proof import WrongRollouts, check_mismatch, evidence
from qurl_megatron.config.schema import Config
from qurl_megatron.learner.learner import Learner
from qurl_megatron.loop.sampling import NothingToTrainOn, settings_of
from qurl_megatron.quantization.activations import activation_dtype
from qurl_megatron.report.console import KL
from qurl_megatron.report.run_log import RunLog
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Member
from qurl_megatron.weight_sync.publish import Publisher

LARGE = 1e-2  # KL(behaviour, proximal), in nats a token, from which a run explains it


def statistics_of(sums: dict[str, float]) -> dict[str, float]:
    """Return the mismatch of a server set, and what the learner predicts of it."""
    predicted = rollout_statistics(sums, "/predicted")
    return rollout_statistics(sums) | {f"predicted_{key}": each for key, each in predicted.items()}


class Proof:
    """Compares the servers' log-probs with the learner's. Collective over all learner ranks."""

    def __init__(
        self,
        clients: dict[str, RolloutClient],
        publishers: dict[str, Publisher],
        prompts: list[Prompt],
        learner: Learner,
        config: Config,
        log: RunLog,
    ) -> None:
        """Store the parts; only global rank 0 uses `clients`, by server set, and `prompts`."""
        self._clients = clients
        self._publishers = publishers
        self._prompts = prompts[: config.rollout.prompts_per_step]
        self._settings = settings_of(replace(config.rollout, completions_per_prompt=1))
        self._learner = learner
        self._config = config
        self._log = log
        self._proven: set[Member] = set()  # rollout servers that were compared

    def before_training(self) -> None:
        """Compare each server set on one completion for each prompt of a step; write mismatch.json.

        Evaluation servers in BF16 show the noise of the engine alone. Any larger mismatch of the
        rollout servers comes from quantization. All sets hold the learner's weights.

        Raises:
            NothingToTrainOn: every episode of an agent has failed.
            WrongRollouts: the format of a set does not explain its mismatch.
        """
        measured = {name: self._measure(name, self._sample) for name in self._clients}
        self._log.write_mismatch({name: statistics_of(sums) for name, sums in measured.items()})
        for name, sums in measured.items():
            self._check(name, sums)

    def of_new_servers(self) -> None:
        """Compare the rollout servers that have begun to serve since the last call, if any.

        Raises:
            WrongRollouts: the format does not explain their mismatch.
        """
        fleet = self._clients["rollout"].fleet
        if device.from_rank_zero(lambda: self._proven.issuperset(fleet.members("serving"))):
            return
        if sums := self._measure("rollout", self._sample_from_new):
            self._check("rollout", sums)

    def _check(self, name: str, sums: dict[str, float]) -> None:
        is_rollout = name == "rollout"
        held = self._config.quantization if is_rollout else self._config.evaluation_quantization
        format = held.format
        try:
            check_mismatch(
                name,
                format,
                sums,
                quantizes_activations=activation_dtype(format) is not None,
                has_experts=self._learner.architecture.num_experts > 0,
            )
        except WrongRollouts as wrong:
            if not self._config.rollout.accept_mismatch:
                raise
            self._log.say(f"warning: {wrong}")
            return
        statistics = statistics_of(sums)
        kl, predicted = statistics[KL], statistics[f"predicted_{KL}"]
        expected = f"and {predicted:.1e} was expected" if predicted else "which is rounding alone"
        text = f"{name} servers: KL(behaviour, proximal) is {kl:.1e}, {expected}"
        if is_rollout and kl > LARGE:
            text += (
                f". That is {format}'s own distance on this model, which every objective but naive "
                "corrects for; `qurl mismatch` names layers to keep in BF16, which make it smaller"
            )
        self._log.say(text)

    def _measure(
        self, name: str, sample: Callable[[RolloutClient], list[RolloutGroup]]
    ) -> dict[str, float]:
        """Return sums over the tokens of rank 0's samples; without samples, nothing."""
        batches = [TrainBatch.empty()]

        def work() -> bool:
            groups = sample(self._clients[name])
            if groups:
                masks = ("mask_sizes", "mask_ids")
                batches.append(pack(groups).only("behaviour_logprobs", *masks))
            return bool(groups)

        publisher, learner, config = self._publishers[name], self._learner, self._config
        if not publisher.while_serving(work):
            return {}
        share = learner.share(batches[-1])
        score = partial(learner.score, share, temperature=config.rollout.temperature)
        as_served = partial(learner.as_served, publisher.converter, getattr(config, name).server)
        score(["proximal_logprobs"])
        with as_served():
            score(["predicted_logprobs", "entropy"])
        sums = learner.measure(share, evidence)
        if name == "rollout" and config.learner.quantized_forward:
            with as_served(config.learner.quantized_forward):
                score(["proximal_logprobs"])
        return sums | learner.measure(share, self._mismatch)

    def _mismatch(self, rows: TrainBatch) -> dict[str, Tensor]:
        cap = self._config.objective.ratio_cap
        assert rows.proximal_logprobs is not None
        measured, predicted = (
            mismatch_sums(rows.proximal_logprobs, logprobs, rows.loss_mask, cap)
            for logprobs in (rows.behaviour_logprobs, rows.predicted_logprobs)
            if logprobs is not None
        )
        of_predicted = {f"{key}/predicted": value for key, value in predicted.items()}
        return measured | of_predicted

    def _sample(self, client: RolloutClient) -> list[RolloutGroup]:
        servers = client.fleet.members("serving")
        completions = client.generate(self._prompts, **self._settings)
        groups = [
            RolloutGroup(prompt, group, [0.0])
            for prompt, group in zip(self._prompts, completions, strict=True)
            if not group[0].failure
        ]
        if not groups:
            why = completions[0][0].failure
            raise NothingToTrainOn(
                f"every episode before the first step has failed; {why}; mend that and resume"
            )
        if client is self._clients["rollout"]:
            self._proven.update(server for server in servers if server.has_answered)
            self._say_if_all_are_cut(client, groups)
        return groups

    def _sample_from_new(self, client: RolloutClient) -> list[RolloutGroup]:
        """Sample answers from the new servers; an agent's run needs no episodes for this."""
        new = [each for each in client.fleet.members("serving") if each not in self._proven]
        by_server = {id(member.server): member for member in new}
        sampling = client.sampling(**self._settings)
        answers = client.gather(
            client.complete(prompt.token_ids, sampling, member.server)
            for prompt, member in zip(self._prompts, cycle(new), strict=False)
        )
        groups = []
        for prompt, (completions, server) in zip(self._prompts, answers, strict=False):
            if id(server) in by_server:  # another answers for a lost or busy one
                groups.append(RolloutGroup(prompt, completions, [0.0]))
                self._proven.add(by_server[id(server)])
        return groups

    def _say_if_all_are_cut(self, client: RolloutClient, groups: Sequence[RolloutGroup]) -> None:
        answers = [group.completions[0] for group in groups]
        if any(answer.episode or not answer.truncated for answer in answers):
            return
        ends = ", ".join(f"{number} {text!r}" for number, text in client.ends())
        self._log.say(
            f"warning: all {len(answers)} answers before the first step were cut off after "
            f"{self._config.rollout.max_completion_length} tokens. These tokens end an answer: "
            f"{ends}. If the model ends with another, set rollout.stop_token_ids; else raise "
            "rollout.max_completion_length"
        )
