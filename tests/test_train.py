"""Which passes a step has before its updates, and how a learner rank ends early."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.algorithm.batch import Completion, Prompt, pack
from qurl_megatron.config.schema import SAID_WHY, Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.learner.learner import NonFinite
from qurl_megatron.loop import train
from qurl_megatron.loop.assemble import Run
from qurl_megatron.loop.proof import ROUNDS, Proof, finding
from qurl_megatron.loop.sampling import NothingToTrainOn
from qurl_megatron.machine.output import qurl_command
from qurl_megatron.rollout.fleet import FleetTooSmall, Member


class Recorder:
    """A learner that notes what it scores."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, list[str], float, bool]] = []
        self.is_reference = False

    def score(self, share: str, names: Sequence[str], *, temperature: float) -> None:
        """Note the share, the scores, the temperature, and whether the reference scores."""
        self.passes.append((share, list(names), temperature, self.is_reference))

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Be the reference."""
        self.is_reference = True
        yield
        self.is_reference = False


def passes(shares: list[str], *words: str) -> list[tuple[str, list[str], float, bool]]:
    """Return what is scored before the updates on these shares."""
    recorder: Any = Recorder()
    config = with_overrides(Config(), ["rollout.temperature=0.6", *words])
    train.score_before_updates(config, recorder, shares)  # type: ignore[arg-type]
    return recorder.passes


def test_all_minibatches_but_the_first_are_scored_and_all_by_the_reference() -> None:
    kl = "objective.kl_coefficient=0.1"
    proximal = [(share, ["proximal_logprobs", "entropy"], 0.6, False) for share in "ab"]
    reference = [(share, ["reference_logprobs"], 0.6, True) for share in "ab"]
    assert passes(["a"]) == []
    assert passes(["a", "b"]) == proximal[1:]
    assert passes(["a"], kl) == reference[:1]
    assert passes(["a", "b"], kl) == proximal[1:] + reference


def test_a_run_evaluates_at_its_last_step_whatever_ended_it() -> None:
    config = with_overrides(Config(), ["steps=9", "evaluation.every_steps=4"])
    due = [step for step in range(1, 7) if train.evaluation_is_due(config, step, step == 6)]
    assert due == [4, 6]


@pytest.mark.parametrize(
    "error",
    [
        NonFinite("on learner rank 3 the loss holds NaN; resume from a checkpoint"),
        NothingToTrainOn(
            "no completion of step 1 can be trained on; KeyError: 'a'; mend that and resume"
        ),
        FleetTooSmall("0 of at least 1 rollout servers, and no more will start"),
    ],
)
def test_a_run_that_cannot_go_on_ends_a_rank_with_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> NoReturn:
        raise error

    monkeypatch.setattr(train, "train", fail)
    monkeypatch.setattr(train, "load", lambda path: Config())
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        code = train.run_rank(Path("runs/a"), [])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        dist.destroy_process_group()
    assert code == SAID_WHY
    resume = "" if isinstance(error, FleetTooSmall) else f": {qurl_command('resume', 'runs/a')}"
    assert capsys.readouterr().out == f"\nqurl: {error}{resume}\n"


def test_without_a_checkpoint_a_run_that_lost_its_servers_did_not_stop_early(
    tmp_path: Path,
) -> None:
    """With one it ends the block: the code then says that the run can be resumed."""
    said: list[str] = []
    saved: Any = SimpleNamespace(poll=lambda wait: None, newest=lambda: None)
    log: Any = SimpleNamespace(steps_done=0, say=said.append)
    run: Any = SimpleNamespace(checkpoints=saved, log=log)
    run.say_stopped_early = partial(Run.say_stopped_early, run)

    def lose() -> None:
        with Run.saving_what_is_done(run):
            raise FleetTooSmall("0 of at least 1 rollout servers")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(FleetTooSmall):
            lose()
        assert said == []
        saved.newest = lambda: tmp_path
        lose()
    finally:
        dist.destroy_process_group()
    assert said[-1] == "stopped early after step 0, with a checkpoint"


class Servers:
    """A client of two servers. The second is busy, and the first answers in its place."""

    def __init__(self) -> None:
        nothing: Any = None
        servers: list[Any] = ["first", "second"]
        self.all = [Member(nothing, index, each, "serving") for index, each in enumerate(servers)]
        self.fleet, self.sampling, self.gather = self, dict, list
        self.asked: list[Any] = []

    def members(self, *_: str) -> list[Member]:
        """Return both servers."""
        return self.all

    def complete(self, *request: Any) -> tuple[list[Completion], Any]:
        """Note who was to answer; return an answer of 240 tokens, of the first server."""
        self.asked.append(request[-1])
        tokens = 240
        return [Completion([7] * tokens, [-1.0] * tokens, "", False, [1] * tokens)], "first"


def test_a_server_is_to_be_compared_until_it_has_answered_enough_tokens() -> None:
    nothing: Any = None
    client: Any = Servers()
    first, second = client.all
    prompts = [Prompt("0", "", "", [1])]
    proof = Proof({"rollout": client}, {}, prompts, nothing, Config(), nothing)
    scored: Any = SimpleNamespace(collect=lambda _: [torch.full((241,), -1.0)] * 2)
    assert proof._unproven() == [first, second]
    file = [Prompt(f"{number:03}", "", "", [1]) for number in range(500)]
    drawn = Proof({}, {}, file, nothing, Config(), nothing)._prompts
    assert max(each.id for each in drawn) > "400"  # not the first lines of a file, which is sorted

    sampled = proof._sample(client)  # more servers than prompts: each is asked all the same
    assert client.asked == ["first", "second"] * ROUNDS
    assert [member for _, member in sampled] == [first, first] * ROUNDS
    batch = pack([group for group, _ in sampled[:2]])
    found = proof._by_server("rollout", scored, batch, [first, second])
    assert {name: sums["tokens"] for name, sums in found.items()} == {
        "rollout_0": 240,
        "rollout_1": 240,
    }
    found = proof._by_server("rollout", scored, batch, [first, first])
    assert found["rollout_0"]["tokens"] == 720
    assert proof._unproven() == [second]
    assert proof._sample_from_new(client) == []  # the first server's answers are no evidence of it
    assert client.asked[2 * ROUNDS :] == ["second"] * ROUNDS
    client.asked.clear()
    proof._answers(client, [first])
    assert client.asked == ["first"] * 2  # of 240 tokens


def test_a_large_distance_is_told_with_what_it_is_and_what_makes_it_smaller() -> None:
    def told(kl: float, predicted: float, *words: str) -> str:
        return finding("rollout", kl, predicted, 1234, with_overrides(Config(), list(words)))

    of_int8 = told(4e-2, 4.1e-2, "quantization.format=int8")
    assert of_int8.startswith(
        "rollout servers: KL(behaviour, proximal) is 4.0e-02 over 1,234 tokens, and 4.1e-02 was"
    )
    assert "int8's own distance on this model" in of_int8
    assert "every objective but naive and on_policy corrects" in of_int8
    assert "`quantization.smoothing=0.5` makes it smaller at no cost, and layers" in of_int8
    for words in (
        ["quantization.format=int8", "quantization.smoothing=0.5"],
        ["quantization.format=fp8"],
    ):
        text = told(4e-2, 4.1e-2, *words)
        assert "smoothing" not in text and "`qurl mismatch` names" in text
    as_served = told(6.4e-2, 0.0, "quantization.format=int8", "learner.quantized_forward=all")
    assert as_served.endswith("is rounding alone: a value between two codes tips either way")
    assert told(2e-2, 0.0, "quantization.format=bf16").endswith("is rounding alone")
    assert told(2e-3, 2e-9, "quantization.format=int4").endswith("is rounding alone")
    assert told(1e-4, 1.1e-4).endswith("is 1.0e-04 over 1,234 tokens, and 1.1e-04 was expected")
    assert "own" not in finding("evaluation", 4e-2, 4e-2, 9, Config())
    assert "own" not in finding("rollout", 4e-2, 4e-2, 9, Config(), explains=False)
