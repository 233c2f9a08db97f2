"""One process that scores: `python -m qurl_megatron.data.scoring_worker CONNECTION`.

It reads `RewardSettings`, loads that reward, answers with `Loaded`, and then answers each request
of the `Scorer` that started it. It ends with that process, whatever happens to it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from multiprocessing.connection import Connection

from qurl_megatron.algorithm.score import Score
from qurl_megatron.data.reward_types import Item, Loaded, Reward, one_line
from qurl_megatron.data.rewards import load
from qurl_megatron.process import LAUNCHER_SIGNALS, die_with_parent


def serve(connection: Connection) -> None:
    """Load the reward, then answer requests until the connection is closed."""
    try:
        reward = load(connection.recv())
    except (Exception, SystemExit) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        connection.send(Loaded(reason, whole_groups=False))
        return
    connection.send(Loaded("", reward.whole_groups))
    while True:
        _answer(connection, connection.recv(), reward)


def _answer(connection: Connection, items: list[Item], reward: Reward) -> None:
    """Send one score per item, each as soon as it is known. Items of a request are of one kind."""
    texts = [text for text, _ in items if text is not None]
    if texts:
        for score in reward.score(texts, items[0][1]):
            connection.send(score)
        return
    for _, question in items:
        connection.send(Score(0.0, {}, reward.unverifiable(question)))


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    die_with_parent()
    # The signals that stop a run are for the learner, which finishes its step with this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS | {signal.SIGINT})
    with contextlib.suppress(EOFError, OSError):  # the other side is gone
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
