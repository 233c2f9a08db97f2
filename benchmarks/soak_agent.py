"""The agent of `benchmarks/soak.py --agents`: turns, tokens of an environment, and failures."""

import asyncio
import os
import random
from typing import Any

TURNS = 3


async def play(policy: Any, problem: Any) -> float:
    """Take a few short turns; raise once in a hundred episodes, die once in three hundred."""
    for number in range(TURNS):
        await policy.generate(max_tokens=random.randint(1, 8))
        if number == 1 and random.random() < 1 / 8:
            policy.begin(policy.ids[:4])
        policy.observe([5 + random.randrange(200) for _ in range(random.randrange(4))])
        await asyncio.sleep(random.random() / 10)
        if random.random() < 1 / 300:
            raise RuntimeError("as it happens")
        if random.random() < 1 / 1000:
            os._exit(1)
    return float(random.random() < 0.5)
