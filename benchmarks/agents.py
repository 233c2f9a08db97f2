"""What episodes of many turns cost rank 0 of the learner: `python -m benchmarks.agents`.

Episodes of `--turns` turns with a trivial tool are played all at once, by agents in processes of
their own. A program of this benchmark answers in the place of the server, at once and with as many
tokens as asked, so that nothing is measured but the client, the agents and their records. Printed
are the CPU seconds of this process per turn, which is what rank 0 does beside training, those of
the agents, and how long it took.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from transformers import AutoTokenizer

from benchmarks import machine
from qurl_megatron.agents.client import AgentClient, collect_rarely
from qurl_megatron.agents.pool import Agents
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import AgentConfig
from qurl_megatron.process import free_port, start_ticks
from qurl_megatron.recipes import quickstart
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server

ANSWERS = """
import sys
from aiohttp import web
async def generate(request):
    body = await request.json()
    count = body["sampling_params"]["max_new_tokens"]
    meta = {"finish_reason": {"type": "length"}, "token_versions": [1] * count,
            "cached_tokens": 0, "output_token_logprobs": [[-1.0, 65, None]] * count}
    return web.json_response({"output_ids": [65] * count, "meta_info": meta})
async def health(request):
    return web.json_response({})
app = web.Application(client_max_size=2**30)
app.router.add_post("/generate", generate)
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None, backlog=4096)
"""
AGENT = """
async def play(policy, problem):
    for number in range(problem.metadata["turns"]):
        turn = await policy.generate()
        policy.observe([60, 61, 62, len(turn.ids) % 50])
    return 1.0
"""
PROMPT_LENGTH, CONTEXT_LENGTH = 50, 4096


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(client: AgentClient, workers: list[psutil.Process], options: argparse.Namespace,
            episodes: int) -> str:  # fmt: skip
    """Play episodes and return a line on them."""
    metadata = {"turns": options.turns}
    prompts = [Prompt(str(n), "", "", [70] * PROMPT_LENGTH, metadata) for n in range(episodes)]
    before = sum(map(cpu_s, workers))
    begin, begin_cpu = time.perf_counter(), time.process_time()
    played = client.generate(
        prompts, completions_per_prompt=1, temperature=1.0, max_response_length=options.tokens
    )
    own_s, wall_s = time.process_time() - begin_cpu, time.perf_counter() - begin
    turns = sum(len(each.episode.turns) for (each,) in played if each.episode)
    assert turns == episodes * options.turns
    of_agents = sum(map(cpu_s, workers)) - before
    return (
        f"{episodes:8} episodes  {1e3 * own_s / turns:6.2f} ms of rank 0 per turn  "
        f"{1e3 * of_agents / turns:6.2f} ms of agents  {wall_s:6.1f} s"
    )


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 150], help="of a turn")
    options = parser.parse_args()
    machine.print_machine("aiohttp")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        quickstart.build_model(directory / "model", seed=0)
        (directory / "agent.py").write_text(AGENT)
        port = free_port()
        answering = subprocess.Popen([sys.executable, "-c", ANSWERS, str(port)])
        try:
            server = Server(
                url=f"http://127.0.0.1:{port}", api_key="none", machine=socket.gethostname(),
                pid=os.getpid(),
                start_ticks=start_ticks(os.getpid()), log_file=f"{directory}/log",
            )  # fmt: skip
            fleet = Fleet("rollout", {0: server}, loaded=True)
            config = AgentConfig(agent=f"{directory}/agent.py:play", agent_workers=1)
            model = str(directory / "model")
            with Agents(config, CONTEXT_LENGTH, model) as agents:
                agents.wait_ready()
                tokenizer = AutoTokenizer.from_pretrained(model)
                client = AgentClient(agents, 0.0, fleet, tokenizer, [1])
                workers = [
                    each
                    for each in psutil.Process().children(recursive=True)
                    if "agents.worker" in " ".join(each.cmdline())
                ]
                collect_rarely()
                for tokens in options.tokens:
                    print(f"turns of {tokens} tokens", flush=True)
                    chosen = argparse.Namespace(turns=options.turns, tokens=tokens)
                    for episodes in options.episodes:
                        print(measure(client, workers, chosen, episodes), flush=True)
        finally:
            answering.kill()
            answering.wait()


if __name__ == "__main__":
    main()
