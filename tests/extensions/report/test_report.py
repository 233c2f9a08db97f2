"""Check the report page: its contents, that it loads nothing, and its light and dark colours."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from logs import Page, averages, write_run
from qurl_megatron.cli import app
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import save, with_overrides
from qurl_megatron.extensions.report import plots
from qurl_megatron.extensions.report.page import write_report
from qurl_megatron.report.metrics import Evaluation
from qurl_megatron.report.record import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def at_staleness(kl: float, fraction: float) -> dict[str, float]:
    return {
        "token_fraction": fraction,
        "kl_behaviour_proximal_k3": kl,
        "tis_truncated_fraction": kl,
        "clip_fraction": 10 * kl,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write a GRPO run, and a PPO run whose last steps have stale tokens."""
    directory = tmp_path_factory.mktemp("runs")
    words = ["model=/a/model", "data=train.jsonl", "optimizer.learning_rate=3e-6"]
    grpo = with_overrides(Config(), [*words, "quantization.format=fp8"])
    ppo = with_overrides(Config(), ["objective.advantage_estimator=gae"])
    staleness = {
        "0": at_staleness(1e-4, 0.5),
        "1": at_staleness(1e-3, 0.4),
        "3-4": at_staleness(6e-3, 0.1),
    }
    late = {"stale_token_fraction": 0.5, "by_staleness": staleness}
    return [
        write_run(directory / "grpo", config=grpo),
        write_run(directory / "ppo", config=ppo, late=late),
    ]


def reported(runs: list[Path]) -> Path:
    """Return the page that `qurl report` writes on these runs."""
    shown = CliRunner().invoke(app, ["report", *map(str, runs)])
    page, is_ready, _ = shown.stdout.partition(" is ready\n")
    assert is_ready, shown.output
    return Path(page)


@pytest.fixture(scope="module")
def one_run(runs: list[Path]) -> Path:
    """Write the page on the GRPO run."""
    return reported(runs[:1])


@pytest.fixture(scope="module")
def two_runs(runs: list[Path]) -> Path:
    """Write the page on both runs."""
    return reported(runs)


def test_a_page_on_two_runs_shows_both_and_loads_nothing(two_runs: Path) -> None:
    page = Page(two_runs.read_text())
    assert page.loaded == []
    assert not re.search(r"url\((?!#)|@import", page.text)
    for name in ("grpo", "ppo"):
        assert f"Time per step: {name}" in page.captions
        assert f"Quantization error (Eq. 14): {name}" in page.captions
    assert "KL(behaviour, proximal), k3 estimate" in page.captions
    assert "Evaluation: aime24" in page.captions
    assert page.cells["held-out accuracy before RL"] == ["25.0% \u00b1 3.1%"] * 2
    assert page.cells["held-out accuracy after RL"] == ["75.0%"] * 2
    assert page.cells["bytes per publish"] == ["300,000 of 1,342,464"] * 2
    assert page.cells["steps"] == ["40 of 100"] * 2
    score = page.cells["aime24 Avg@1, first \u2192 last"]
    assert score == ["20.0% \u00b1 6.2% \u2192 40.0% \u00b1 6.2%"] * 2
    identifiers = re.findall(r'clipPath id="([^"]+)"', page.text)
    assert len(identifiers) == len(set(identifiers)) > 10


def test_the_colour_key_is_for_several_runs_and_the_critic_for_ppo(
    one_run: Path, two_runs: Path
) -> None:
    for page, count in ((one_run, 0), (two_runs, 1)):
        assert page.read_text().count('<p id="key">') == count
        assert page.read_text().count(">critic</text>") == count


def test_a_run_that_is_still_training_has_a_page(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    for name in ("summary.json", "weights.jsonl", "mismatch.json"):
        (run_dir / name).unlink()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "rew')  # a line that is being written
    write_report([run_dir], tmp_path / "index.html")
    cells = Page((tmp_path / "index.html").read_text()).cells
    assert cells["steps"] == ["40 of 100"]
    assert cells["held-out accuracy after RL"] == ["not measured"]
    assert cells["KL before training, evaluation servers"] == ["not measured"]
    plot = plots.svg("divergence", plots.divergence, [read_run(run_dir)])
    assert "nats" in plot and "before training" not in plot
    assert list(read_run(run_dir).scores()["aime24", "Avg@1"]) == [20]
    state = run_dir / "checkpoints" / "step_000020" / "state.json"
    state.parent.mkdir(parents=True)
    before = Evaluation(0.25, {"aime24": averages(0.2)}, 0.03125)
    state.write_text(json.dumps({"evaluation_before": asdict(before)}))
    write_report([run_dir], tmp_path / "index.html")
    cells = Page((tmp_path / "index.html").read_text()).cells
    assert cells["held-out accuracy before RL"] == ["25.0% \u00b1 3.1%"]
    score = cells["aime24 Avg@1, first \u2192 last"]
    assert score == ["20.0% \u00b1 6.2% \u2192 30.0% \u00b1 6.2%"]
    for name in ("summary.json", "mismatch.json"):  # a copy that was interrupted
        (run_dir / name).write_text("")
    record = read_run(run_dir)
    assert (record.summary, record.mismatch) == ({}, {})


def test_the_page_shows_the_mismatch_of_each_server_set_before_training(one_run: Path) -> None:
    page = Page(one_run.read_text())
    assert page.cells["KL before training, evaluation servers"] == ["2.5e-05"]
    assert page.cells["KL before training, rollout servers"] == ["1.3e-04"]
    assert "evaluation servers before training" in page.text


def test_a_run_that_has_moved_is_read_where_it_is(tmp_path: Path) -> None:
    config = Config(output_dir=str(tmp_path), name="run")
    moved = write_run(tmp_path / "run", config=config).rename(tmp_path / "moved")
    write_run(tmp_path / "run", config=config)
    run = read_run(moved)
    assert (run.name, run.config.run_dir, run.final_model) == (
        "moved",
        moved,
        moved / "final_model",
    )


def test_evaluations_are_ordered_by_step(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    by_step = read_run(run_dir).scores()["aime24", "Avg@1"]
    means = [(step, average["mean"]) for step, average in by_step.items()]
    assert means == [(0, 0.2), (20, 0.3), (40, 0.4)]


def test_a_directory_without_a_run_or_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.yaml"):
        read_run(tmp_path)
    save(Config(), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="no step is complete yet"):
        read_run(tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
@pytest.mark.parametrize(("dark", "paper"), [(False, (255, 255, 255)), (True, (22, 24, 28))])
def test_a_browser_renders_the_page_in_light_and_dark_colours(
    dark: bool, paper: tuple[int, int, int], one_run: Path, tmp_path: Path
) -> None:
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    flags += "--disable-background-networking --disable-component-update --window-size=1250,1600 "
    flags += "--blink-settings=preferredColorScheme=0 --force-dark-mode" if dark else ""
    subprocess.run(
        [
            str(CHROMIUM),
            *flags.split(),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--screenshot={tmp_path / 'page.png'}",
            f"file://{one_run}",
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    picture = Image.open(tmp_path / "page.png").convert("RGB")
    counts = cast(list[tuple[int, tuple[int, int, int]]], picture.getcolors(2**24))
    colours = {colour: count for count, colour in counts}
    assert max(colours, key=lambda colour: colours[colour]) == paper
    ink = (230, 230, 230) if dark else (26, 26, 26)
    assert colours[ink] > 1000  # letters and axes
    assert colours[(43, 140, 214)] > 1000  # curves


def test_drift_and_quantization_are_told_apart_only_if_a_run_has_stale_tokens(
    one_run: Path, two_runs: Path
) -> None:
    page = Page(one_run.read_text())
    assert "Drift and quantization" not in page.text
    assert not [caption for caption in page.captions if "staleness" in caption]

    page = Page(two_runs.read_text())
    assert [caption for caption in page.captions if "staleness" in caption] == [
        f"{title}: ppo" for title in plots.STALENESS_PLOTS
    ]
    assert page.cells["stale tokens, last tenth of steps"] == ["none", "50.0%"]
    # (0.4 x 1e-3 + 0.1 x 6e-3) / 0.5
    assert page.cells["KL at staleness 0, above staleness 0, last tenth of steps"] == [
        "not measured, not measured",
        "1.0e-04, 2.0e-03",
    ]
    assert "staleness 3-4" in page.text


def test_the_grid_of_layers_averages_experts_and_leaves_layers_in_bf16_empty() -> None:
    weights = {
        "model.layers.0.self_attn.q_proj.weight": {"weight_quant_error": 0.5},
        "model.layers.0.mlp.experts.0.down_proj.weight": {"weight_quant_error": 0.1},
        "model.layers.0.mlp.experts.1.down_proj.weight": {"weight_quant_error": 0.3},
        "model.layers.1.self_attn.q_proj.weight": {"weight_quant_error": 0.25},
        "model.layers.2.linear_attn.in_proj_qkv:key.weight": {"weight_quant_error": 0.7},
        "model.layers.2.linear_attn.out_proj.weight": {"weight_quant_error": 0.6},
    }
    axes = Figure().subplots()
    run: Any = SimpleNamespace(weights=weights)
    plots.layer_grid(axes, [run], "weight_quant_error")
    shown = axes.images[0].get_array()
    assert shown is not None
    names = plots.PROJECTIONS + plots.LINEAR_PROJECTIONS
    columns = [names.index(name) for name in ("in_proj_qkv:key", "out_proj", "q_proj")]
    assert shown[2][columns].filled(-1).tolist() == pytest.approx([0.7, 0.6, -1])
    columns = [names.index(name) for name in ("q_proj", "down_proj", "o_proj")]
    assert shown[0][columns].filled(-1).tolist() == pytest.approx([0.5, 0.2, -1])
    assert shown[1][columns].filled(-1).tolist() == pytest.approx([0.25, -1, -1])


def test_a_page_begins_with_what_was_trained_on_what_and_how(one_run: Path) -> None:
    cells = Page(one_run.read_text()).cells
    assert [*cells][1:6] == [
        "model", "data", "learning rate", "completions per step", "longest completion"
    ]  # fmt: skip
    assert [cells[name] for name in ("model", "data", "learning rate", "rollout format")] == [
        ["/a/model"], ["train.jsonl"], ["3e-06"], ["fp8"]
    ]  # fmt: skip
    assert cells["completions per step"] == ["64 prompts x 8, in 1 minibatches"]


def test_the_page_shows_what_resumes_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "resumed")
    change = {"after_step": 20, "field": "optimizer.learning_rate", "before": 1e-5, "now": 3e-6}
    (run_dir / "changes.jsonl").write_text(f'{json.dumps(change)}\n{{"field": "steps"}}\n')
    write_report([run_dir], page := tmp_path / "page.html")
    cells = Page(page.read_text()).cells
    assert cells["changed by resumes"] == [
        "changed after step 20: optimizer.learning_rate=3e-06, 1e-05 before"
    ]
    assert "changes.jsonl, line 2: " in capsys.readouterr().err


def test_a_curve_of_zeros_has_an_axis_from_0_to_1_and_another_its_own(tmp_path: Path) -> None:
    zeros = read_run(write_run(tmp_path / "zeros"))
    for step in zeros.steps:
        step["clip_fraction"] = 0.0
    for metric, limits in {"clip_fraction": (0, 1), "entropy": None}.items():
        axes = Figure().subplots()
        plots.curves(axes, [zeros], [metric], "fraction")
        assert limits is None or axes.get_ylim() == limits
        assert limits or axes.get_ylim()[0] > 0.5


def test_a_comparison_replaces_no_report_of_its_runs(
    runs: list[Path], one_run: Path, two_runs: Path
) -> None:
    reports = runs[0] / "report"
    assert (one_run, two_runs) == (reports / "index.html", reports / "comparison.html")
    assert not (runs[1] / "report").exists()
    assert "<title>grpo</title>" in one_run.read_text()
