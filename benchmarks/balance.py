"""Compare ways to divide prompts among servers: `python -m benchmarks.balance`.

A simulation. A server samples all its sequences one token further in each step, at most
`CAPACITY` of them, and the others wait in its queue. A step takes STEP_S + SEQUENCE_S for each
running sequence. The lengths of answers are lognormal, cut off at MAX_TOKENS. Nobody knows them
before: a policy knows only which groups have been answered.

    round robin       as a router does that knows nothing of the servers
    fewest groups     to the server with the fewest groups that are not answered
    fewest tokens     to the one with the fewest tokens outstanding, which is what `Fleet.ask` does:
                      a group counts as prompt + completions x longest answer until it is answered

"at once" asks for all groups of a step, as a synchronous run does; the time is that of the last
answer. "in flight" keeps a number of groups under way, as a run with `rollout.max_staleness` does,
until all are answered; the time is again that of the last answer. A slow server takes twice as long
for everything.

Times are means over SEEDS seeds, relative to the time in which the servers would be done together
if work could be divided at will.

With `--servers` two real servers sample instead, without a GPU, the second with room for few
sequences: groups whose lengths nobody knows before, a number of them in flight. Both policies take
turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import math
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import httpx

from qurl_megatron.config.schema import ServerConfig
from qurl_megatron.recipes import quickstart
from qurl_megatron.rollout.fleet import Fleet, Member
from qurl_megatron.rollout.server import CONNECTIONS, Server, ServerPlan, wait_ready

SEEDS = 10
CAPACITY = 256
STEP_S, SEQUENCE_S = 0.020, 0.00005
MAX_TOKENS = 16384
MEDIAN_TOKENS, SIGMA = 2000, 1.0
COMPLETIONS = 16
REAL_CAPACITIES = (64, 8)  # max_running_requests of the real servers
REAL_GROUPS, REAL_IN_FLIGHT, REAL_MAX_TOKENS = 120, 16, 200


@dataclass
class SimulatedServer:
    """A server at its own time, with what it runs and what waits."""

    slowness: float = 1.0
    now_s: float = 0.0
    steps: int = 0  # decoded so far
    asked: int = 0  # groups it was ever given
    groups: int = 0  # that are not answered
    tokens: int = 0  # outstanding
    running: list[tuple[int, int]] = field(default_factory=list)  # heap of last step and group
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # length and group

    def fill(self) -> None:
        while self.waiting and len(self.running) < CAPACITY:
            length, group = self.waiting.popleft()
            heapq.heappush(self.running, (self.steps + length, group))

    def step_s(self) -> float:
        return self.slowness * (STEP_S + SEQUENCE_S * len(self.running))

    def next_end_s(self) -> float:
        """Return when the next sequence ends; infinity if none runs."""
        if not self.running:
            return math.inf
        return self.now_s + (self.running[0][0] - self.steps) * self.step_s()

    def finish_one(self) -> int:
        """Run until a sequence ends; return its group."""
        self.now_s = self.next_end_s()
        self.steps, group = heapq.heappop(self.running)
        self.fill()
        return group

    def advance(self, to_s: float) -> None:
        """Run until `to_s`, before any sequence ends."""
        if self.running:
            self.steps += int((to_s - self.now_s) / self.step_s())
        self.now_s = to_s


Policy = Callable[[SimulatedServer], float]  # the server of the smallest value is given the group
POLICIES: dict[str, Policy] = {
    "round robin": lambda server: server.asked,
    "fewest groups": lambda server: server.groups,
    "fewest tokens": lambda server: server.tokens,
}


def simulate(
    policy: Policy,
    prompts: list[int],
    lengths: list[list[int]],
    *,
    in_flight: int,
    slow: int,
    num: int,
) -> float:
    """Return when the last of the groups is answered; at most `in_flight` are asked for at once.

    `prompts` and `lengths` are tokens of each group's prompt and answers. The first `slow` of `num`
    servers are slow.
    """
    servers = [SimulatedServer(2.0 if index < slow else 1.0) for index in range(num)]
    missing = [len(answers) for answers in lengths]
    bounds = [
        prompt + len(answers) * MAX_TOKENS for prompt, answers in zip(prompts, lengths, strict=True)
    ]
    unasked = deque(range(len(lengths)))

    def ask(now_s: float) -> None:
        group = unasked.popleft()
        server = min(servers, key=policy)
        server.advance(now_s)
        server.asked += 1
        server.groups += 1
        server.tokens += bounds[group]
        server.waiting.extend((length, group) for length in lengths[group])
        server.fill()

    for _ in range(min(in_flight, len(lengths))):
        ask(0.0)
    while any(missing):
        server = min(servers, key=SimulatedServer.next_end_s)
        group = server.finish_one()
        missing[group] -= 1
        if not missing[group]:
            server.groups -= 1
            server.tokens -= bounds[group]
            if unasked:
                ask(server.now_s)
    return max(server.now_s for server in servers)


def relative_times(groups: int, in_flight: int, slow: int, num: int) -> dict[str, list[float]]:
    """Return each policy's times of all seeds, relative to the ideal."""
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    for seed in range(SEEDS):
        draw = random.Random(seed)
        prompts = [draw.randint(100, 1000) for _ in range(groups)]
        lengths = [
            [
                min(MAX_TOKENS, max(1, round(draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))))
                for _ in range(COMPLETIONS)
            ]
            for _ in range(groups)
        ]
        rates = [(0.5 if index < slow else 1.0) for index in range(num)]
        step_s = STEP_S + SEQUENCE_S * CAPACITY
        ideal_s = sum(map(sum, lengths)) / CAPACITY * step_s / sum(rates)
        for name, policy in POLICIES.items():
            time_s = simulate(policy, prompts, lengths, in_flight=in_flight, slow=slow, num=num)
            times[name].append(time_s / ideal_s)
    return times


class RoundRobin(Fleet):
    """A fleet that asks its servers in turn."""

    _turn = 0

    async def _choose(self, tokens: int) -> Member:
        serving = self.members("serving")
        self._turn += 1
        member = serving[self._turn % len(serving)]
        member.outstanding += tokens
        return member


def time_of_real_servers(fleet: Fleet, seed: int) -> float:
    """Return the seconds in which all groups are answered."""
    draw = random.Random(seed)
    room = asyncio.Semaphore(REAL_IN_FLIGHT)

    async def ask(http: httpx.AsyncClient) -> None:
        length = min(REAL_MAX_TOKENS, round(draw.lognormvariate(math.log(40), SIGMA)) + 1)
        body = {
            "input_ids": [draw.randrange(3, 200) for _ in range(8)],
            "sampling_params": {"n": 4, "max_new_tokens": length, "ignore_eos": True},
        }

        async def post(server: Server) -> None:
            (await http.post(f"{server.url}/generate", json=body)).raise_for_status()

        async with room:
            await fleet.ask(8 + 4 * REAL_MAX_TOKENS, post)

    async def ask_all() -> None:
        async with httpx.AsyncClient(timeout=None, limits=CONNECTIONS) as http:
            await asyncio.gather(*(ask(http) for _ in range(REAL_GROUPS)))

    begin = time.perf_counter()
    asyncio.run(ask_all())
    return time.perf_counter() - begin


def compare_real_servers(rounds: int) -> None:
    """Print the seconds of both policies, in turn."""
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.ExitStack() as stack,
    ):
        model = Path(directory) / "model"
        quickstart.build_model(model, seed=0)
        servers: dict[int, Server] = {}
        for index, capacity in enumerate(REAL_CAPACITIES):
            config = ServerConfig(
                mem_fraction_static=0.3, max_total_tokens=16384, max_running_requests=capacity
            )
            servers[index] = ServerPlan(
                model,
                config,
                "bf16",
                context_length=512,
                log_file=Path(directory) / f"server_{index}.log",
                seed=index,
            ).start()
            stack.callback(servers[index].stop)
        wait_ready(list(servers.values()), timeout_s=400)
        fleets = {
            "round robin": RoundRobin("rollout", servers, loaded=True),
            "fewest tokens": Fleet("rollout", servers, loaded=True),
        }
        for fleet in fleets.values():
            time_of_real_servers(fleet, seed=0)  # warm-up
        times: dict[str, list[float]] = {name: [] for name in fleets}
        for seed in range(rounds):
            for name, fleet in fleets.items():
                times[name].append(time_of_real_servers(fleet, seed))
        print(f"{REAL_GROUPS} groups, {REAL_IN_FLIGHT} in flight, seconds in turn:")
        for name, seconds in times.items():
            print(f"{name:>14}  {fmean(seconds):.2f}  ", *(f"{each:.2f}" for each in seconds))


def main() -> None:
    """Print a table of the simulation, or the times of real servers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.servers:
        compare_real_servers(arguments.rounds)
        return
    print(f"{'servers':>8} {'slow':>5} {'groups':>7} {'asked for':>10}", *POLICIES, sep="  ")
    for num, slow, groups, in_flight in (
        (8, 0, 128, 128),
        (8, 0, 512, 512),
        (8, 1, 512, 512),
        (8, 0, 2048, 256),
        (8, 1, 2048, 256),
        (64, 4, 4096, 2048),
    ):
        times = relative_times(groups, in_flight, slow, num)
        how = "at once" if in_flight >= groups else f"{in_flight}"
        cells = [f"{fmean(t):.2f} ± {stdev(t):.2f}" for t in times.values()]
        print(f"{num:>8} {slow:>5} {groups:>7} {how:>10}", *cells, sep="  ")


if __name__ == "__main__":
    main()
