"""Which server is asked, and what becomes of what a lost server owed. No engine is needed."""

import asyncio
import errno
import os
import re
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from answering import Address
from fleets import make_fleet, make_server, wait_for
from qurl_megatron.machine.processes import start_ticks
from qurl_megatron.rollout import fleet as fleets
from qurl_megatron.rollout.fleet import (
    FEW_REQUESTS,
    TRANSITIONS,
    Fleet,
    FleetTooSmall,
    RequestRefused,
    ServerBusy,
)
from qurl_megatron.rollout.requests import NoAnswer, Reply
from qurl_megatron.rollout.roster import incarnation, report_lost, reported_lost
from qurl_megatron.rollout.server import Server, ServerFailed
from waiting import wait_until


@dataclass
class Script:
    """Requests that last until they are released, by server and in order."""

    begun: list[str] = field(default_factory=list)
    release: dict[str, asyncio.Event] = field(default_factory=dict)

    async def __call__(self, server: Server) -> str:
        self.begun.append(server.url)
        await self.release.setdefault(server.url, asyncio.Event()).wait()
        return server.url


def test_the_states_of_a_server_are_drawn_as_the_code_has_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    drawn = re.findall(r"^    (\w+) +─ ([\w ]+) ─+► (\w+)$", page, re.MULTILINE)
    assert sorted(drawn) == sorted(
        (state, why, next_state)
        for state, ways in TRANSITIONS.items()
        for next_state, why in ways.items()
    )


def test_a_server_goes_no_way_that_the_table_lacks(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, 1)
    (member,) = fleet.members("serving")
    member.lose("killed")
    member.join()
    assert member.state == "lost"
    with pytest.raises(AssertionError, match="lost to serving"):
        member.change("serving")


def test_a_prompt_goes_to_the_server_with_the_fewest_tokens_outstanding(tmp_path: Path) -> None:
    fleet, script = make_fleet(tmp_path, 3), Script()

    async def run() -> list[str]:
        tasks = []
        for tokens in (100, 10, 50, 30, 5, 20):
            tasks.append(asyncio.create_task(fleet.ask(tokens, script)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert [member.outstanding for member in fleet.members("serving")] == [100, 65, 50]
        for event in script.release.values():
            event.set()
        return await asyncio.gather(*tasks)

    # 100 | 10 | 50, then 30 and 5 to the second (45 in all, the third has 50), then 20 as well
    assert fleet.controller.wait(run()) == [f"http://{index}" for index in (0, 1, 2, 1, 1, 1)]
    assert [member.outstanding for member in fleet.members("serving")] == [0, 0, 0]


def test_an_episode_stays_on_its_server_unless_that_has_far_more_to_do_or_is_lost(
    tmp_path: Path,
) -> None:
    fleet = make_fleet(tmp_path)
    first, second = (member.server for member in fleet.members("serving"))
    owes = fleet.members("serving")[0]

    async def answer(server: Server) -> Server:
        return server

    async def ask(tokens: int, prefer: Server) -> Server:
        return await fleet.ask(tokens, answer, prefer)

    async def run() -> None:
        assert await ask(10, second) is second  # although the first has no more to do
        loop = asyncio.get_running_loop()
        owes.outstanding = 21
        owes.requests = {loop.create_future() for _ in range(FEW_REQUESTS - 1)}
        assert await ask(10, first) is first
        owes.requests.add(loop.create_future())
        assert await ask(10, first) is second
        owes.outstanding = 20
        assert await ask(10, first) is first
        owes.lose("hangs")
        assert await ask(10, first) is second

    fleet.controller.wait(run())


def test_requests_of_a_lost_server_are_asked_of_the_others_once(tmp_path: Path) -> None:
    fleet, script = make_fleet(tmp_path), Script()

    async def run() -> list[str]:
        tasks = [asyncio.create_task(fleet.ask(10, script)) for _ in range(6)]
        await asyncio.sleep(0.05)
        lost = fleet.members("serving")[0]
        lost.lose("hangs")
        await asyncio.sleep(0.05)
        assert lost.outstanding == 0 and not lost.requests
        script.release["http://0"].set()  # too late
        script.release["http://1"].set()
        return await asyncio.gather(*tasks)

    assert fleet.controller.wait(run()) == ["http://1"] * 6
    assert script.begun.count("http://0") == 3 and script.begun.count("http://1") == 6
    ((lost, *_),) = reported_lost(tmp_path)
    assert lost == "rollout"


def test_a_server_that_does_not_answer_is_lost_and_a_refusal_is_an_error(tmp_path: Path) -> None:
    said: list[str] = []
    fleet = make_fleet(tmp_path, say=said.append)

    async def fails(server: Server) -> str:
        if server.url == "http://0":
            raise server.failed("closed the connection")
        return server.url

    async def refuses(server: Server) -> str:
        raise RequestRefused("the prompt is too long")

    assert fleet.controller.wait(fleet.ask(1, fails)) == "http://1"
    assert [member.index for member in fleet.members("serving")] == [1]
    why = f"server http://0 closed the connection; {tmp_path / 'server_0.log'}"
    assert said == [f"server rollout_0 is lost: {why}"]
    with pytest.raises(RequestRefused, match="the prompt is too long"):
        fleet.controller.wait(fleet.ask(1, refuses))
    assert [member.index for member in fleet.members("serving")] == [1]


def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "SILENT_S", 0.01)
    fleet = make_fleet(tmp_path, 1)
    answers = iter([ServerBusy(), ServerBusy(), None])

    async def request(server: Server) -> str:
        if problem := next(answers):
            raise problem
        return "answer"

    assert fleet.controller.wait(fleet.ask(1, request)) == "answer"


def test_nothing_is_sampled_while_fewer_servers_serve_than_needed(tmp_path: Path) -> None:
    fleet, script = make_fleet(tmp_path, 2, min_servers=2, patience_s=0.3), Script()
    first, second = fleet.members("serving")
    first.lose("died")
    begin = time.monotonic()
    with pytest.raises(
        FleetTooSmall, match=r"1 of at least 2 rollout servers.*server rollout_0.*died"
    ):
        fleet.controller.wait(fleet.ask(1, script))
    assert 0.3 < time.monotonic() - begin < 2
    assert script.begun == [] and second.state == "serving"
    assert isinstance(FleetTooSmall(""), ServerFailed)  # which commands print without a traceback


def test_a_server_that_waits_for_weights_is_no_reason_to_give_up(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, 1, loaded=False)
    (member,) = fleet.members("joining")
    assert fleet.has_joining() and fleet.needs_admission()
    for _ in range(3):
        fleet.check_size()
        time.sleep(0.01)
    member.join()
    assert not fleet.has_joining() and not fleet.needs_admission()
    assert [member.index for member in fleet.members("serving")] == [0]


async def never(server: Server) -> str:
    await asyncio.Event().wait()
    return ""


def test_a_silent_server_is_lost_if_it_does_not_answer_and_is_not_paused(
    tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "SILENT_S", 0.1)
    server = make_server(0, tmp_path, url=address.url)
    with closing(Fleet("rollout", {0: server}, loaded=True, health_timeout_s=2.0)) as fleet:
        fleet.watch()
        (member,) = fleet.members("serving")
        asking = fleet.controller.start(fleet.ask(1, never))
        assert wait_until(lambda: bool(address.asked))
        assert not wait_for(fleet, "lost", 1.0)  # it answers
        address.delay_s = 60.0
        assert wait_until(lambda: 60.0 in address.asked)
        member.is_paused = True  # while it is asked
        assert not wait_for(fleet, "lost", 3.0)
        assert address.asked.count(60.0) == 1
        address.delay_s = 0.0
        member.expect_answers()
        assert not wait_for(fleet, "lost", 1.0)
        address.delay_s = 60.0
        assert wait_for(fleet, "lost", 30.0)
        with pytest.raises(FleetTooSmall, match="did not answer /health in 2 s"):
            asking.result(timeout=10)
    assert reported_lost(tmp_path) == {incarnation("rollout", 0, server)}


def test_a_full_disk_delays_the_report_of_a_lost_server_and_stops_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]

    def report(*args: Any) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        report_lost(*args)

    monkeypatch.setattr(fleets, "report_lost", report)
    server = make_server(0, tmp_path)
    with closing(Fleet("rollout", {0: server}, loaded=True)) as fleet:
        fleet.watch()
        (member,) = fleet.members("serving")
        member.lose("holds other weights")
        assert reported_lost(tmp_path) == set()
        full[0] = False
        expected = {incarnation("rollout", 0, server)}
        assert wait_until(lambda: reported_lost(tmp_path) == expected)


def test_a_server_that_compiles_in_its_first_prompt_is_kept_and_one_that_hangs_later_is_not(
    tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "SILENT_S", 0.1)
    server = make_server(0, tmp_path, url=address.url, gpus=[0])
    address.delay_s = 3.0

    async def compile_and_answer(server: Server) -> str:
        await asyncio.sleep(2.0)
        return server.url

    with closing(Fleet("rollout", {0: server}, loaded=True, health_timeout_s=0.5)) as fleet:
        fleet.watch()
        assert fleet.controller.wait(fleet.ask(1, compile_and_answer)) == server.url
        assert 3.0 in address.asked  # it was silent, and did not answer /health in time
        address.delay_s = 60.0
        with pytest.raises(FleetTooSmall, match="did not answer /health in 0.5 s"):
            fleet.controller.wait(asyncio.wait_for(fleet.ask(1, never), timeout=120))


def test_a_server_without_a_gpu_may_compute_a_step_before_it_answers(
    tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "SILENT_S", 0.1)
    server = make_server(0, tmp_path, url=address.url, step_s=2.0)
    address.delay_s = 1.5
    with closing(Fleet("rollout", {0: server}, loaded=True, health_timeout_s=0.5)) as fleet:
        fleet.watch()
        with pytest.raises(FleetTooSmall, match="did not answer /health in 2.5 s"):
            asking = fleet.controller.start(fleet.ask(1, never))
            assert wait_until(lambda: address.asked.count(1.5) == 2)  # it has answered once
            address.delay_s = 60.0
            asking.result(timeout=60)


@pytest.mark.parametrize("answers_a_prompt", [True, False])
def test_a_server_that_answers_a_prompt_while_it_is_probed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_a_prompt: bool
) -> None:
    fleet = make_fleet(tmp_path, 1)
    (member,) = fleet.members("serving")

    async def answer(server: Server) -> str:
        return server.url

    async def silence(server: Server, method: str, path: str, **_: Any) -> Reply:
        if answers_a_prompt:
            await fleet.ask(1, answer)
        raise NoAnswer(f"did not answer {path}")

    monkeypatch.setattr(Server, "ask", silence)
    fleet.controller.wait(fleet._probe(member))
    assert member.state == ("serving" if answers_a_prompt else "lost")


def test_the_roster_replaces_a_server_that_died_even_if_a_file_system_once_fails_to_give_it(
    tmp_path: Path, address: Address
) -> None:
    dead = make_server(0, tmp_path, start_ticks=1)  # its pid belongs to another process now
    roster = {0: dead}
    stale = [OSError(errno.ESTALE, "Stale file handle")]

    def read() -> dict[int, Server]:
        if stale:
            raise stale.pop()
        return roster

    with closing(Fleet("rollout", roster, loaded=True)) as fleet:
        fleet.watch(read)
        assert wait_for(fleet, "lost")
        assert reported_lost(tmp_path) == set()  # nothing is left to kill
        roster = {0: make_server(0, tmp_path, url=address.url)}
        assert wait_for(fleet, "joining")
        (member,) = fleet.members("joining")
        assert member.server is roster[0]
        parent = os.getppid()  # another process in its place, while it still runs
        roster = {0: make_server(0, tmp_path, pid=parent, start_ticks=start_ticks(parent))}
        assert wait_until(lambda: member.state == "lost")
        roster = {}
        assert wait_for(fleet, "lost")


def test_nobody_waits_for_servers_that_will_not_be_started_again(tmp_path: Path) -> None:
    dead = make_server(0, tmp_path, start_ticks=1)
    with closing(Fleet("rollout", {0: dead}, loaded=True, patience_s=1000)) as fleet:
        roster = {0: dead}
        fleet.watch(lambda: roster)
        assert wait_for(fleet, "lost")
        fleet.check_size()  # its successor may come
        roster = {}
        with pytest.raises(FleetTooSmall, match=r"0 of at least 1 .*no more will start.*died"):
            fleet.controller.wait(asyncio.wait_for(fleet.ask(1, never), timeout=10))


def test_an_error_of_the_watch_is_not_silent(tmp_path: Path) -> None:
    def read() -> dict[int, Server]:
        raise ValueError("not a roster")

    with closing(make_fleet(tmp_path, 1, loaded=False)) as fleet:
        fleet.watch(read)
        with pytest.raises(ValueError, match="not a roster"):
            fleet.controller.wait(fleet.ask(1, never))
