"""A run proves its rollouts: it compares the servers' log-probs with those of the learner.

It measures the train-inference mismatch before the first step, after a resume, and before it trains
on samples of a new server. The run ends there if the weights' format does not explain the mismatch
of a server, as the learner finds by computing as the servers do. A server that has answered with
fewer than `ENOUGH` tokens is asked again in the next step, and judged once it has them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.objective import mismatch_sums, rollout_statistics
from qurl_megatron.algorithm.proof import ENOUGH, WrongRollouts, added, check_mismatch, evidence
from qurl_megatron.config.schema import Config
from qurl_megatron.data.prompts import draw
from qurl_megatron.learner.learner import Learner
from qurl_megatron.learner.shares import Share
from qurl_megatron.loop.sampling import NothingToTrainOn, settings_of
from qurl_megatron.quantization.activations import activation_dtype
from qurl_megatron.report.console import KL, LARGE
from qurl_megatron.report.run_log import RunLog
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Member
from qurl_megatron.weight_sync.publish import Publisher

Sums = dict[str, float]
Sampled = tuple[RolloutGroup, Member | None]
"""One completion and the server that sampled it; None: turns of several servers."""

SMALLEST = 1e-6  # prediction, in nats a token, that is more than the learner's own rounding
ROUNDS = 8  # of answers, at most, to get `ENOUGH` tokens of each server at once


def statistics_of(sums: Sums) -> dict[str, float]:
    """Return the mismatch of a server set, and what the learner predicts of it."""
    predicted = rollout_statistics(sums, "/predicted")
    return rollout_statistics(sums) | {f"predicted_{key}": each for key, each in predicted.items()}


def finding(
    name: str, kl: float, predicted: float, tokens: float, config: Config, *, explains: bool = True
) -> str:
    """Return what a user is told of a server set that passed: its KL, and what a large one means.

    Args:
        name: rollout or evaluation.
        kl: KL(behaviour, proximal), in nats a token.
        predicted: what the learner expects it to be; about 0 if it computes as the servers do.
        tokens: how many it was measured on.
        explains: whether to tell what a large one means.
    """
    held = config.quantization if name == "rollout" else config.evaluation_quantization
    is_large = explains and name == "rollout" and kl > LARGE
    is_far = predicted > SMALLEST
    expected = f"and {predicted:.1e} was expected" if is_far else "which is rounding alone"
    of = f"is {kl:.1e} over {tokens:,.0f} tokens"
    text = f"{name} servers: KL(behaviour, proximal) {of}, {expected}"
    if not is_large:
        return text
    if not is_far:
        chaotic = activation_dtype(held.format) is not None
        return f"{text}: a value between two codes tips either way" if chaotic else text
    smaller = "layers in BF16, which `qurl mismatch` names, make it smaller"
    if held.format == "int8" and not held.smoothing:
        smaller = f"`quantization.smoothing=0.5` makes it smaller at no cost, and {smaller} too"
    return (
        f"{text}. That is {held.format}'s own distance on this model, which every objective but "
        f"naive and on_policy corrects for; {smaller}"
    )


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
        count = config.rollout.prompts_per_step
        self._prompts = draw(prompts, config.seed, config.prompts.weights, count)
        self._settings = settings_of(replace(config.rollout, completions_per_prompt=1))
        self._learner = learner
        self._config = config
        self._log = log
        # Of each server's own tokens so far, on global rank 0.
        self._evidence: defaultdict[Member, Sums] = defaultdict(dict)
        self._has_explained = False

    def before_training(self) -> None:
        """Compare each server set on completions of drawn prompts; write mismatch.json.

        Evaluation servers in BF16 show the noise of the engine alone. Any larger mismatch of the
        rollout servers comes from quantization. All sets hold the learner's weights.

        Raises:
            NothingToTrainOn: every episode of an agent has failed.
            WrongRollouts: the format of a set does not explain its mismatch.
        """
        self._log.say("comparing log-probs of the servers with the learner's")  # takes a minute
        measured = {name: self._measure(name, self._sample) for name in self._clients}
        self._log.write_mismatch(
            {name: statistics_of(sums) for name, (sums, _) in measured.items()}
        )
        for name, (sums, by_server) in measured.items():
            self._check(name, name, sums, by_server)

    def of_new_servers(self) -> None:
        """Compare the rollout servers that serve and have not answered `ENOUGH` tokens, if any.

        mismatch.json then has what was found as `new_servers`.

        Raises:
            WrongRollouts: the format does not explain their mismatch.
        """
        if not device.from_rank_zero(lambda: bool(self._unproven())):
            return
        sums, by_server = self._measure("rollout", self._sample_from_new)
        if sums:
            self._log.write_mismatch({"new_servers": statistics_of(sums)})
            self._check("rollout", "new_servers", sums, by_server)

    def _unproven(self) -> list[Member]:
        """Return the rollout servers that serve and have not answered `ENOUGH` tokens."""
        serving = self._clients["rollout"].fleet.members("serving")
        return [each for each in serving if self._evidence[each].get("tokens", 0) < ENOUGH]

    def _check(self, name: str, key: str, sums: Sums, by_server: dict[str, Sums]) -> None:
        """Judge a set's servers, and say what was found; `key` is that of mismatch.json."""
        is_rollout = name == "rollout"
        held = self._config.quantization if is_rollout else self._config.evaluation_quantization
        judge = partial(
            check_mismatch,
            name,
            held.format,
            by_server,
            quantizes_activations=activation_dtype(held.format) is not None,
            has_experts=self._learner.architecture.num_experts > 0,
        )
        statistics = statistics_of(sums)
        try:
            device.from_rank_zero(judge)
        except WrongRollouts as wrong:
            if not self._config.rollout.accept_mismatch:
                raise
            self._log.say(f"warning: {wrong}")
            self._log.write_mismatch({key: statistics | {"accepted": 1.0}})
            return
        kl, explains = statistics[KL], not self._has_explained
        found = name, kl, statistics[f"predicted_{KL}"], sums["tokens"]
        self._log.say(finding(*found, self._config, explains=explains))
        self._has_explained |= is_rollout and kl > LARGE

    def _measure(
        self, name: str, sample: Callable[[RolloutClient], list[Sampled]]
    ) -> tuple[Sums, dict[str, Sums]]:
        """Return sums over the tokens of rank 0's samples; without samples, nothing.

        Returns:
            What `statistics_of` takes; and on global rank 0 the `evidence` of each server's tokens
            so far, by its name, or of all episodes.
        """
        batches, servers = [TrainBatch.empty()], list[Member | None]()

        def work() -> bool:
            sampled = sample(self._clients[name])
            if sampled:
                masks = ("mask_sizes", "mask_ids")
                batch = pack([group for group, _ in sampled])
                batches.append(batch.only("behaviour_logprobs", *masks))
                servers.extend(member for _, member in sampled)
            return bool(sampled)

        publisher, learner, config = self._publishers[name], self._learner, self._config
        if not publisher.while_serving(work):
            return {}, {}
        share = learner.share(batches[-1])
        score = partial(learner.score, share, temperature=config.rollout.temperature)
        as_served = partial(learner.as_served, publisher.converter, getattr(config, name).server)
        score(["proximal_logprobs"])
        with as_served():
            score(["predicted_logprobs", "entropy"])
        by_server = self._by_server(name, share, batches[-1], servers)
        if name == "rollout" and config.learner.quantized_forward:
            with as_served(config.learner.quantized_forward):
                score(["proximal_logprobs"])
        return learner.measure(share, self._mismatch), by_server

    def _by_server(
        self, name: str, share: Share, batch: TrainBatch, servers: list[Member | None]
    ) -> dict[str, Sums]:
        """Return the evidence of each server on global rank 0, nothing elsewhere; collective.

        `servers` has the server of each completion of `batch`.
        """
        names = ("proximal_logprobs", "predicted_logprobs", "entropy")
        scores = {each: share.collect(each) for each in names}
        if not servers:
            return {}
        scored = replace(batch, **{each: torch.cat(of_all) for each, of_all in scores.items()})
        assert batch.completions is not None
        members = [servers[number] for number in batch.completions.tolist()]
        by_server = {}
        for member in dict.fromkeys(members):
            rows = scored.select([row for row, each in enumerate(members) if each is member])
            sums = {key: float(value) for key, value in evidence(rows).items()}
            if member is None:
                by_server[name] = sums
                continue
            self._evidence[member] = added([sums, self._evidence[member]])
            by_server[f"{name}_{member.index}"] = self._evidence[member]
        return by_server

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

    def _sample(self, client: RolloutClient) -> list[Sampled]:
        if self._config.rollout.agent:
            sampled: list[Sampled] = [(group, None) for group in self._episodes(client)]
        else:
            sampled = self._answers(client, client.fleet.members("serving"))
        if client is self._clients["rollout"]:
            self._say_if_all_are_cut(client, [group for group, _ in sampled])
        return sampled

    def _sample_from_new(self, client: RolloutClient) -> list[Sampled]:
        """Sample answers from unproven servers; an agent's run needs no episodes for this."""
        unproven = self._unproven()
        # Another server answers for a lost or busy one, and is no evidence of it.
        return [each for each in self._answers(client, unproven) if each[1] in unproven]

    def _answers(self, client: RolloutClient, servers: list[Member]) -> list[Sampled]:
        """Sample answers of each of `servers`, in rounds, until each has sampled `ENOUGH` tokens.

        A round has an answer to each prompt, in turn from each server, and at least one from each.
        """
        by_server = {id(each.server): each for each in client.fleet.members("serving", "lost")}
        preferred = cycle([each.server for each in servers] or [None])
        prompts = list(islice(cycle(self._prompts), max(len(self._prompts), len(servers))))
        sampling = client.sampling(**self._settings)
        sampled: list[Sampled] = []
        tokens: Counter[Member | None] = Counter()
        for _ in range(ROUNDS):
            answers = client.gather(
                client.complete(prompt.token_ids, sampling, next(preferred)) for prompt in prompts
            )
            for prompt, (completions, server) in zip(prompts, answers, strict=True):
                member = by_server.get(id(server))
                sampled.append((RolloutGroup(prompt, completions, [0.0]), member))
                tokens[member] += completions[0].num_sampled
            if all(tokens[each] >= ENOUGH for each in servers):
                break
        return sampled

    def _episodes(self, client: RolloutClient) -> list[RolloutGroup]:
        """Sample an episode of each prompt; its turns may be of several servers."""
        completions = client.generate(self._prompts, **self._settings)
        groups = [
            RolloutGroup(prompt, group, [0.0])
            for prompt, group in zip(self._prompts, completions, strict=True)
            if not group[0].failure
        ]
        if not groups:
            raise NothingToTrainOn(
                f"every episode before the first step has failed; {completions[0][0].failure}; "
                "mend that and resume"
            )
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
