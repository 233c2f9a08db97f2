"""Generate the tasks of reasoning-gym that draw from the state of their process (`entries.py`).

They use Python's own random numbers, or go through sets of texts, whose order is another in each
process. So their seed decides less than all, and a run could not resume with its problems. Here a
process of their own generates them, in which both are always the same.
"""

import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def entries_of(task: str, **options: Any) -> Sequence[Any]:
    """Return the entries of a task, as reasoning-gym gives them; the options have a seed.

    Raises:
        Exception: the task does not take its options.
    """
    command = ["env", "PYTHONHASHSEED=0", sys.executable, "-m", __name__]
    given = pickle.dumps((task, options))
    made = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True).stdout
    entries: Sequence[Any] | Exception = pickle.loads(made)
    if isinstance(entries, Exception):
        raise entries
    return entries


def main() -> None:
    """Read a task and its options, and write its entries, or the exception that it raises."""
    sys.stdout, out = sys.stderr, sys.stdout.buffer  # a task may print
    task, options = pickle.load(sys.stdin.buffer)
    import reasoning_gym

    made: list[Any] | Exception
    random.seed(options["seed"])
    try:
        entries = reasoning_gym.create_dataset(task, **options)
        made = [entries[index] for index in range(len(entries))]
    except Exception as error:
        made = error
    pickle.dump(made, out)


if __name__ == "__main__":
    main()
