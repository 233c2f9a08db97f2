"""Which passes a step has before its updates, and how a learner rank ends early."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import SAID_WHY, Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.learner.learner import NonFinite
from qurl_megatron.loop import train
from qurl_megatron.loop.assemble import Run
from qurl_megatron.loop.proof import Proof
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


def test_a_server_that_got_no_prompt_before_training_is_still_to_be_compared() -> None:
    nothing: Any = None
    members = [Member(nothing, number, nothing, "serving") for number in range(2)]

    def generate(prompts: list[Prompt], **_: Any) -> list[list[Completion]]:
        members[0].has_answered = True
        return [[Completion([7], [0.0], "", False, [1])] for _ in prompts]

    client: Any = SimpleNamespace(
        fleet=SimpleNamespace(members=lambda _: members), generate=generate
    )
    prompts = [Prompt("0", "", "", [1])]
    proof = Proof({"rollout": client}, {}, prompts, nothing, Config(), nothing)
    proof._sample(client)
    assert proof._proven == {members[0]}
