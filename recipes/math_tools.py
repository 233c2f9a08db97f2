"""An agent that solves mathematics with Python, for Qwen2.5-7B on 16 H100s.

    qurl train math_tools model=DIR data=FILE

Requirements:

- `model`: Qwen2.5-7B-Instruct, or another model that was trained to call tools in Qwen's form, as a
  Hugging Face directory.
- `data`: a jsonl file with `question` and `answer` on each line.
- 8 GPUs for the learner and 8 for the servers; machines that allow user namespaces, in which the
  tool runs. It was never run on GPUs.

With Qwen2.5-32B, the recipe `scaling_32b` plays the same agent:

    qurl launch scaling_32b model=DIR data=FILE rollout.max_completion_length=4096 \\
        rollout.agent=qurl_megatron.recipes.math_tools:solve \\
        rollout.max_turns=8 rollout.max_episode_tokens=16384

Sources of the settings: the recipe `grpo`. Turns and lengths are this project's own: ReTool
(arXiv:2504.11536) trains on up to 16,384 tokens with a Python tool.
"""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
import tempfile
from typing import Any

from qurl_megatron.config.schema import Config, LearnerConfig
from qurl_megatron.recipes import grpo

SYSTEM = "Solve the problem. Use Python where it helps. Put the final answer into \\boxed{}."
TIME_S, MEMORY_BYTES, FILE_BYTES = 10, 2**30, 2**20
SHOWN_CHARACTERS = 4000  # of what a program prints
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # from linux/sched.h
LIBC = ctypes.CDLL(None, use_errno=True)  # here: a fork must not wait for the loader's lock


def recipe() -> Config:
    config = grpo.recipe()
    config.learner = LearnerConfig(
        tensor_parallel_size=4, data_parallel_size=2, micro_batch_size=1, dtype="bfloat16"
    )
    config.optimizer.minibatches_per_step = 2
    rollout = config.rollout
    rollout.agent = f"{__name__}:solve"
    rollout.max_turns = 8
    rollout.max_completion_length = 4096
    rollout.max_episode_tokens = 16384
    rollout.servers = 8
    return config


async def solve(policy: Any, problem: Any) -> None:
    """Play one problem; the run's `reward` compares the last turn with the answer."""
    from qurl_megatron.extensions.agents.tools import call_tools  # where agents are played, it is

    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem.question},
    ]
    while True:
        reply = await policy.chat(messages, tools=[python])
        answers = await call_tools(reply, [python])
        messages += [reply, *answers]
        if not answers:
            return


async def python(code: str) -> str:
    """Run a Python program, and return what it prints.

    Args:
        code: The program. It has 10 seconds, 1 GB of memory and no network.
    """
    # Its output is a file: asyncio would wait forever for a pipe that nobody reads to its end.
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-u", "-c", code),
            cwd=empty,
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_confine,
            start_new_session=True,
        )
        late = ""
        try:
            await asyncio.wait_for(process.wait(), TIME_S)
        except TimeoutError:
            late = f"took longer than {TIME_S} seconds\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            await process.wait()
        output.seek(0)
        # A character of UTF-8 has at most four bytes.
        printed = output.read(4 * SHOWN_CHARACTERS).decode(errors="replace")
        return printed[:SHOWN_CHARACTERS] + late


def _confine() -> None:
    """Limit what this process, which is about to run a program, may use.

    It has no network, since its own namespace has none, and can write no file of more than a
    megabyte. It can read what the user can read: nothing secret may lie where agents run.
    """
    limits = {
        resource.RLIMIT_CPU: TIME_S,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    if LIBC.unshare(NEW_USER | NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "this machine allows no user namespaces")
