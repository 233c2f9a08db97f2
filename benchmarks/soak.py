"""Publish a thousand times to two servers that are killed, stopped, flooded and sent wrong weights.

    python -m benchmarks.soak --publishes 1000 --minutes 25 --seed 0

A learner with a tiny model samples one step ahead, trains and publishes, on real servers that their
starter replaces. Every `--fault-every` publishes, at a random moment, one of these happens:

    kill      SIGKILL to a server, or to one of its processes
    kill all  SIGKILL to both servers
    stop      SIGSTOP to a server, and SIGCONT after 10 s; the learner may have replaced it by then
    queue     more prompts than the servers' queues hold, which refuse some
    weights   a server loads two tensors into each other's place

After every publish the checksums of each server that serves are read back. The command prints

    faults    of each kind, and the servers that were lost and started again
    prompts   how many were asked for; each was trained on once, or dropped as too old and asked for
              again, or was asked for ahead, for the step that was not taken when time was up
    answers   whose versions or log-probs are not those of published weights; must be none
    checksums that were read back, and how many differ from what was sent; must be none
    memory    how much each process's memory grows per publish; `process_memory.py` says what is
              flat. Servers are measured in the last half of the publishes, in which no fault
              ends one. None may grow
    orphans   processes and files that are left at the end; must be none

and ends with code 1 if something must not be. `--minutes` ends it after fewer publishes. With
`--agents`, completions are episodes of several turns, of an agent that sometimes fails or dies.
"""

import contextlib
import gc
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from safetensors.torch import load_file, save_file

from benchmarks import machine
from benchmarks.deployment import (
    COMPLETION_LENGTH,
    COMPLETIONS,
    FEW_RECORDS,
    PER_STEP,
    PROMPT_LENGTH,
    Deployment,
    held_by,
    send_signal,
    tree,
    wait_until,
)
from benchmarks.process_memory import growth_of
from qurl_megatron import device
from qurl_megatron.algorithm.advantages import group_advantages
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.objective import PolicyLoss, minibatches
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import RolloutConfig, SamplingConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.extensions.agents.client import AgentClient
from qurl_megatron.extensions.agents.pool import Agents
from qurl_megatron.loop.producer import Producer
from qurl_megatron.machine.memory import trim_heap
from qurl_megatron.recipes import quickstart
from qurl_megatron.rollout.fleet import AdmissionNeeded, ServerBusy
from qurl_megatron.rollout.server import Server, ServerFailed
from qurl_megatron.weight_sync.publish import Published

FAULTS = ["kill", "kill all", "stop", "queue", "weights"]
STOPPED_S = 10.0
LATEST_S = 1.0  # a fault begins at most this long after the step that it is due in
BURST = 80  # prompts, with four completions each
BURST_LENGTH = 8  # tokens of a completion
QUIET = 1 / 2  # of the publishes; a server's memory is measured in them
STARTER_POLL_S = 0.2
# Largest mean |behaviour - learner's log-prob| over a completion, in nats. INT8 makes 0.03; weights
# that a server has drawn at random make 0.6 on the mean, and 0.3 or more over five tokens.
LARGEST_DIFFERENCE = 0.2
MARK = "QURL_SOAK"  # variable in the environment of every process of this command


@dataclass
class Outcome:
    """What a soak has seen."""

    publishes: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0  # servers
    started_again: int = 0
    asked: int = 0  # prompts sent, without those of a full queue
    trained: int = 0
    dropped: int = 0  # groups that were too old
    failed: int = 0  # episodes of an agent
    ahead: int = 0  # groups that no step has taken
    refusals: int = 0  # of full queues
    checksums_read: int = 0  # servers, publish by publish
    largest_difference: float = 0.0
    # (publish, bytes) of each process, by its role and number
    memory: defaultdict[tuple[str, int], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    problems: list[str] = field(default_factory=list)


class Faults:
    """What befalls the servers of a deployment."""

    def __init__(self, deployment: Deployment, seed: int, every: int, outcome: Outcome) -> None:
        self._deployment = deployment
        self._random = random.Random(seed)
        self._every = every
        self._outcome = outcome
        self._deck: list[str] = []
        self._due = every
        self._threads = ThreadPoolExecutor(2)
        self._running: list[Future[None]] = []
        self._mixed: Server | None = None  # loads tensors into each other's place
        self.mixed_up: list[Server] = []

    def begin(self, step: int, *, may_end_servers: bool) -> None:
        """Begin a fault if one is due, after both servers have recovered from the last."""
        if step < self._due:
            return
        self._due = step + self._random.randint(1, 2 * self._every - 1)
        self.wait()
        fleet = self._deployment.fleet
        wait_until(lambda: len(fleet.members("serving", "joining")) == 2)
        if not self._deck:
            self._deck = self._random.sample(FAULTS, len(FAULTS))
        kind = self._deck.pop() if may_end_servers else "queue"
        self._outcome.faults[kind] += 1
        print(f"publish {step}: {kind}", flush=True)
        delay_s = self._random.uniform(0, LATEST_S)
        servers = list(self._deployment.roster.values())
        server = self._random.choice(servers)
        if kind in ("kill", "kill all"):
            killed = servers if kind == "kill all" else [server]
            processes = [process for each in killed for process in tree(each)]
            if kind == "kill" and self._random.random() < 0.5:
                processes = [self._random.choice(processes)]
            self._later(delay_s, lambda: send_signal(processes, signal.SIGKILL))
        elif kind == "stop":
            self._later(delay_s, lambda: self._stop(tree(server)))
        elif kind == "queue":
            self._later(delay_s, self._flood)
        else:
            self._mixed = server

    def wait(self) -> None:
        """Wait until all faults have happened; raise what went wrong in one."""
        for running in self._running:
            running.result()
        self._running.clear()

    def close(self) -> None:
        self._threads.shutdown()

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Within this context, exchange two names in a bucket for the server whose turn it is."""
        original = Server.update_weights

        async def update_weights(
            server: Server, names: Any, dtypes: Any, shapes: Any, **options: Any
        ) -> None:
            names = list(names)
            if server == self._mixed:
                alike: dict[tuple[object, ...], int] = {}
                for place, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
                    other = alike.setdefault((dtype, *shape), place)
                    if other != place:
                        names[place], names[other] = names[other], names[place]
                        self._mixed = None
                        self.mixed_up.append(server)
                        break
            await original(server, names, dtypes, shapes, **options)

        with patch.object(Server, "update_weights", update_weights):
            yield

    def _later(self, delay_s: float, begin: Callable[[], None]) -> None:
        def wait() -> None:
            time.sleep(delay_s)
            begin()

        self._running.append(self._threads.submit(wait))

    def _stop(self, processes: list[psutil.Process]) -> None:
        send_signal(processes, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        send_signal(processes, signal.SIGCONT)

    def _flood(self) -> None:
        """Ask for more than the servers take at a time."""
        prompts = [make_prompt(-1 - number) for number in range(BURST)]
        while True:
            try:
                groups = self._deployment.client.generate(
                    prompts,
                    completions_per_prompt=4,
                    temperature=1.0,
                    max_completion_length=BURST_LENGTH,
                )
                break
            except AdmissionNeeded:  # no server serves; the step's publish will change that
                time.sleep(STARTER_POLL_S)
        if [len(group) for group in groups] != [4] * BURST:
            self._outcome.problems.append("a prompt of a full queue has not four completions")


class Soak:
    """Samples, trains and publishes, and compares everything with what it must be."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        publishes: int,
        seed: int,
        fault_every: int,
        quiet: float,
        until: float,
        agents: Agents | None = None,
    ) -> None:
        """Ask for nothing yet.

        Args:
            fault_every: publishes between two faults, on average.
            quiet: share of the publishes, at the end, without faults that end a server.
            until: the `time.monotonic()` after which no step begins.
            agents: play the completions; None: they are single answers.
        """
        self._deployment = deployment
        client = deployment.client
        if agents:
            parts = (client.fleet, client._tokenizer, client.stop_token_ids)
            client = AgentClient(agents, 0.0, *parts)
        self._client = client
        self._publishes = publishes
        self._quiet_from = (1 - quiet) * publishes
        self._began = time.monotonic()
        self._until = until
        self.outcome = Outcome()
        self._faults = Faults(deployment, seed, fault_every, self.outcome)
        self._random = random.Random(seed)
        self._measure_every = max(1, publishes // 100)
        self._processes_seen: set[psutil.Process] = set()
        self._said_before = len(deployment.said)
        prompts = [make_prompt(number) for number in range(publishes * PER_STEP)]
        self._expected = PromptStream(prompts, seed)
        rollout = deployment.config.rollout
        self._producer = Producer(
            rollout, publishes, PromptStream(prompts, seed), self._sample, self._score
        )

    def run(self) -> Outcome:
        """Run all steps; return what was seen."""
        outcome, closed = self.outcome, threading.Event()
        with ThreadPoolExecutor(1) as starter:  # the servers that it starts die with its thread
            with closing(self._faults), self._faults.exchanging(), counted_refusals(outcome):
                checking = starter.submit(self._keep_servers, closed)
                try:
                    for step in range(1, self._publishes + 1):
                        if time.monotonic() > self._until:
                            break
                        self._step(step)
                        outcome.publishes = step
                        if checking.done():
                            checking.result()
                    self._faults.wait()
                    fleet = self._deployment.fleet
                    wait_until(lambda: len(fleet.members("serving", "joining")) == 2)
                finally:
                    closed.set()
                    self._deployment.fleet.controller.wait(self._producer.close())
                checking.result()
            self._look_back()
        return outcome

    def _step(self, step: int) -> None:
        publisher = self._deployment.publisher
        self._faults.begin(step, may_end_servers=step <= self._quiet_from)
        self._train(self._batch(step, publisher.version))
        self._read_back(publisher.publish())
        if step % self._measure_every == 0:
            self._measure(step)

    def _batch(self, step: int, version: int) -> TrainBatch:
        """Take the groups of a step, and check what is known of them."""
        deployment = self._deployment
        while True:
            taking = self._producer.take(
                PER_STEP, step=step, version=version, interrupted=deployment.fleet.has_joining
            )
            groups = deployment.fleet.controller.wait(taking)
            if groups is not None:
                break
            deployment.publisher.admit()
        self._producer.end_step()
        self.outcome.trained += len(groups)
        if len(groups) != PER_STEP:
            self.outcome.problems.append(f"step {step} got {len(groups)} prompts")
        for group, expected in zip(groups, self._expected.next(PER_STEP), strict=False):
            self._check(group, expected, version)
        advantages = group_advantages([group.rewards for group in groups], "grpo")
        return pack(groups, advantages, version)

    def _check(self, group: RolloutGroup, expected: Prompt, version: int) -> None:
        """Check a group that is trained on, in whose place this prompt is expected."""
        problems = self.outcome.problems
        if group.prompt.id != expected.id:
            problems.append(f"prompt {group.prompt.id} was taken out of turn")
        self.outcome.failed += len(group.failed)
        if len(group.completions) + len(group.failed) != COMPLETIONS:
            problems.append(f"prompt {group.prompt.id} has {len(group.completions)} completions")
        oldest = version - self._deployment.config.rollout.max_staleness
        for completion in (each for whole in group.completions for each in whole.sequences()):
            versions = completion.token_versions
            if len(versions) != sum(completion.sampled) or versions != sorted(versions):
                problems.append(f"prompt {group.prompt.id}: its tokens have versions {versions}")
            elif versions[0] < oldest or versions[-1] > version:
                problems.append(f"prompt {group.prompt.id}: {versions} in a step of {version}")

    def _train(self, batch: TrainBatch) -> None:
        """Compare the servers' log-probs with the learner's, and update the learner."""
        config, learner = self._deployment.config, self._deployment.learner
        shares = [learner.share(minibatch) for minibatch in minibatches(config, batch)]
        for share in shares:
            learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
        scores = [each for share in shares for each in share.collect("proximal_logprobs")]
        assert batch.token_staleness is not None and batch.behaviour_logprobs is not None
        of_version = batch.loss_mask & (batch.token_staleness == 0)
        differences = (torch.cat(scores) - batch.behaviour_logprobs).abs() * of_version
        lengths = batch.lengths.tolist()
        completions = zip(differences.split(lengths), of_version.split(lengths), strict=True)
        largest = max(float(sum_.sum() / max(1, mask.sum())) for sum_, mask in completions)
        self.outcome.largest_difference = max(self.outcome.largest_difference, largest)
        if not largest < LARGEST_DIFFERENCE:
            self.outcome.problems.append(
                f"a completion's log-probs differ by {largest:.2f} from those of its weights"
            )
        for share in shares:
            learner.update(share, PolicyLoss(config.objective), temperature=1.0)

    def _read_back(self, published: Published) -> None:
        """Compare what the servers that serve hold with what was sent."""
        sent, fleet = published.conversion.checksums, self._deployment.fleet
        for member in fleet.members("serving"):
            server = member.server
            if server in self._faults.mixed_up:
                self.outcome.problems.append(f"{server.url} serves with tensors exchanged")
            try:
                held = held_by(server)
            except ServerFailed:  # it has been killed or stopped since
                continue
            self.outcome.checksums_read += 1
            if held != sent and member in fleet.members("serving"):
                self.outcome.problems.append(
                    f"{server.url} serves other weights than version {published.version}"
                )

    def _measure(self, step: int) -> None:
        """Note the processes that there are, and what memory they use.

        Servers are measured after the faults that end some. Pages of files are left out, which the
        kernel drops and reads again as it likes. What a fork shares with its parent counts.
        Otherwise every page that a server is the first to write to would look like growth.
        """
        gc.collect()  # garbage that Python would free later is not growth
        trim_heap()
        roles = [("learner, fleet, starter", psutil.Process())]
        for index, server in self._deployment.roster.items():
            for process in tree(server):
                with contextlib.suppress(psutil.Error):
                    command = process.cmdline()
                    if command:  # else it has ended, and its parent does not know yet
                        self._processes_seen.add(process)
                        if step > self._quiet_from:
                            is_main = process.pid == server.pid
                            name = "server" if is_main else command[0].split()[0]
                            roles.append((f"{name} {index}", process))
        for role, process in roles:
            with contextlib.suppress(psutil.Error):  # it has ended
                memory = process.memory_info()
                used = memory.rss - memory.shared
                self.outcome.memory[role, process.pid].append((step, used))

    def _look_back(self) -> None:
        """Check what can be known only at the end."""
        outcome, deployment = self.outcome, self._deployment
        outcome.dropped, outcome.ahead = self._producer.dropped, self._producer.in_flight
        if outcome.asked != outcome.trained + outcome.dropped + outcome.ahead:
            outcome.problems.append("a prompt was asked for and is neither trained on nor ahead")
        owed = sum(member.outstanding for member in deployment.fleet.members("serving", "joining"))
        if owed:
            outcome.problems.append(f"{owed} tokens of no request count as outstanding")
        present = {process for server in deployment.roster.values() for process in tree(server)}
        left = [process for process in self._processes_seen - present if process.is_running()]
        outcome.problems += [f"{process} has outlived its server" for process in left]
        said = deployment.said[self._said_before :]
        outcome.lost = sum(" is lost: " in line for line in said)
        outcome.started_again = sum(" serves: " in line for line in said)
        caught = sum("does not hold the weights" in line for line in said)
        if caught != len(self._faults.mixed_up):
            exchanged = f"tensors were exchanged in {len(self._faults.mixed_up)} servers"
            outcome.problems.append(f"{exchanged}, noticed in {caught}")
        outcome.seconds = time.monotonic() - self._began

    def _keep_servers(self, closed: threading.Event) -> None:
        """Do what the launcher does: start lost servers again."""
        while not closed.wait(STARTER_POLL_S):
            self._deployment.starter.check()

    async def _sample(self, prompt: Prompt, rollout: RolloutConfig) -> list[Completion]:
        self.outcome.asked += 1
        client = self._client
        return await client.group(
            prompt,
            client.sampling(
                completions_per_prompt=rollout.completions_per_prompt,
                temperature=rollout.temperature,
                max_completion_length=rollout.max_completion_length,
            ),
        )

    def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        scores: Future[list[Score]] = Future()
        scores.set_result(
            [Score(float(self._random.random() < 0.5), {}, failure="") for _ in completions]
        )
        return scores


@contextlib.contextmanager
def counted_refusals(outcome: Outcome) -> Iterator[None]:
    """Count the times that a full queue refuses a prompt."""

    class Counted(ServerBusy):
        def __init__(self) -> None:
            outcome.refusals += 1

    with patch("qurl_megatron.rollout.client.ServerBusy", Counted):
        yield


def make_prompt(number: int) -> Prompt:
    """Return a prompt; negative numbers are for a flood of the queues."""
    digits = [2 + (abs(number) >> (6 * place) & 63) for place in range(3)]
    return Prompt(str(number), "", "", [70 + (number < 0), *digits, 5, 6][:PROMPT_LENGTH])


def orphans(mark: str, directory: Path) -> list[str]:
    """Return the processes and the files that are left of this command."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if process.environ().get(MARK) == mark and not is_zombie:
                left.append(str(process))
    return [*left, *map(str, directory.iterdir())]


def build_model(directory: Path) -> Path:
    """Write a tiny model whose weights are large enough for it to prefer some tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    quickstart.build_model(directory, seed=0, **sizes, **heads)
    file = directory / "model.safetensors"
    weights = load_file(file)
    larger = {name: weight * (1 if "norm" in name else 3) for name, weight in weights.items()}
    save_file(larger, file, metadata={"format": "pt"})
    return directory


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--publishes", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=25.0, help="no step begins after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault-every", type=int, default=15, help="publishes, on average")
    parser.add_argument("--agents", action="store_true", help="sample episodes of several turns")
    arguments = parser.parse_args()
    machine.print_machine("torch", "sglang", "megatron-core")
    until, mark = time.monotonic() + 60 * arguments.minutes, secrets.token_hex(8)
    device.extend_environment({MARK: mark, "GLOO_SOCKET_IFNAME": "lo", **FEW_RECORDS})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory, scratch = Path(name), Path(name) / "scratch"
        scratch.mkdir()
        tempfile.tempdir = str(scratch)  # of this process and of the servers
        model = build_model(directory / "model")
        with ExitStack() as stack:
            agents = None
            if arguments.agents:
                config = SamplingConfig(
                    agent="benchmarks.soak_agent:play",
                    agent_workers=2,
                    max_episode_tokens=PROMPT_LENGTH + COMPLETION_LENGTH,
                )
                agents = stack.enter_context(Agents(config, model))
            outcome = Soak(
                Deployment(directory, model, stack),
                publishes=arguments.publishes,
                seed=arguments.seed,
                fault_every=arguments.fault_every,
                quiet=QUIET,
                until=until,
                agents=agents,
            ).run()
        wait_for_end = time.monotonic() + 10
        while (left := orphans(mark, scratch)) and time.monotonic() < wait_for_end:
            time.sleep(0.2)
    sys.exit(report(outcome, arguments.publishes, left))


def report(outcome: Outcome, publishes: int, left: list[str]) -> int:
    """Print what a soak has seen; return the exit code."""
    print(f"\npublishes: {outcome.publishes} of {publishes} in {outcome.seconds:.0f} s")
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.faults.items()))
    print(f"faults: {faults}; servers lost {outcome.lost}, started again {outcome.started_again}")
    print(
        f"prompts: asked for {outcome.asked}; trained on {outcome.trained}, dropped as too old and "
        f"asked for again {outcome.dropped}, asked for ahead of a step that was not taken "
        f"{outcome.ahead}; refused by full queues {outcome.refusals} times"
    )
    if outcome.failed:
        print(f"episodes that failed: {outcome.failed}")
    print(f"checksums read back from {outcome.checksums_read} servers")
    print(f"log-probs differ by at most {outcome.largest_difference:.3f} on a completion's mean")
    problems = list(outcome.problems)
    for (role, number), history in outcome.memory.items():
        if growth := growth_of(history):
            print(f"memory of {role} ({number}): {growth}")
            if growth.verdict == "grows":
                problems.append(f"the memory of {role} grows")
    for problem, times in Counter(problems).most_common(20):
        print(f"WRONG: {problem}" + (f" ({times} times)" if times > 1 else ""))
    print(f"orphans: {', '.join(left) or 'none'}")
    return 1 if problems or left else 0


if __name__ == "__main__":
    main()
