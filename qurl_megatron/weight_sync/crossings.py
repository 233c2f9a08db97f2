"""Which learner rank writes which part on which machine, and which parts cross machines.

A rank writes into the parameters of servers on its own machine only. Several ranks can hold the
same part of a bucket: the data- and context-parallel replicas. On a machine that has one of them,
that one writes. To any other machine the part crosses once, from one of its holders to one rank
there, which writes it:

    2 stages x 2 replicas, a machine for each replica    nothing crosses
    2 stages, a machine for each                         each stage's parts cross to the other
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """One rank's part of every bucket, on its way to a rank of another machine."""

    sender: int  # global rank
    receiver: int
    round: int  # a receiver gets one part of a bucket in each round


@dataclass(frozen=True)
class Crossings:
    """How the parts of all ranks reach all target machines."""

    writers: frozenset[int]  # global ranks that write their own part
    transfers: tuple[Transfer, ...]

    @property
    def converting(self) -> frozenset[int]:
        """The ranks whose parts are written or sent."""
        return self.writers | {transfer.sender for transfer in self.transfers}


def find_crossings(
    machines: Sequence[str], holders: Sequence[tuple[int, ...]], targets: Collection[str]
) -> Crossings:
    """Return how the parts of all ranks reach the machines `targets`, each of which has a rank.

    Args:
        machines: the machine of each rank.
        holders: for each rank, all ranks that hold the same part, itself included.
    """
    writers: set[int] = set()
    transfers: list[Transfer] = []
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    ranks = range(len(machines))
    # Every rank computes this itself, so the order must be the same everywhere.
    for part in sorted(set(holders)):
        for target in sorted(targets):
            here = [rank for rank in part if machines[rank] == target]
            if here:
                writers.add(here[0])
                continue
            sender = min(part, key=lambda rank: (sent[rank], rank))
            there = (rank for rank in ranks if machines[rank] == target)
            receiver = min(there, key=lambda rank: (received[rank], rank))
            transfers.append(Transfer(sender, receiver, received[receiver]))
            sent[sender] += 1
            received[receiver] += 1
    return Crossings(frozenset(writers), tuple(transfers))
