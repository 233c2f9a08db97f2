"""The page on a run: everything it says is there, needs no network, and reads on light and dark."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config
from qurl_megatron.config.yaml_file import save
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.report.page import ReportError, advice, read_run, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = {field.name: 0.0 for field in dataclasses.fields(StepMetrics)} | {
    "kl_behaviour_proximal_k3": 1e-4,
    "ratio_proximal_behaviour_max": 1.2,
    "code_flip_fraction": 0.1,
    "weight_update_norm": 1e-5,
    "weight_quant_error": 5e-5,
    "publish_bytes": 1_342_464,
    "held_out_accuracy": None,
    "evaluation": None,
}
PROJECTIONS = [f"self_attn.{x}_proj" for x in "qkvo"] + [
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
]


def averages(mean: float) -> dict[str, dict[str, float]]:
    return {
        "Avg@1": {"mean": mean, "standard_error": 0.0625},
        "Avg@32 sampled": {"mean": mean / 2, "standard_error": 0.03125},
    }


def write_run(
    run_dir: Path, *, late: dict[str, float] | None = None, config: Config | None = None
) -> Path:
    """A run of 40 steps, the last ten of them with other values; evaluated before, at 20, after."""
    run_dir.mkdir()
    save(config or Config(), run_dir / "config.yaml")
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            line = QUIET | {"step": step, "reward_mean": step / 50}
            if step == 20:
                line |= {"held_out_accuracy": 0.5, "evaluation": {"aime24": averages(0.3)}}
            file.write(json.dumps(line | (late or {}) if step > 30 else line) + "\n")
    measured = {"weight_update_norm": 1e-5, "weight_quant_error": 5e-5, "code_flip_fraction": 0.1}
    weights = {f"model.layers.{n}.{p}.weight": measured for n in range(3) for p in PROJECTIONS}
    publish = {"weight_version": 41, "weights": weights}
    (run_dir / "weights.jsonl").write_text(json.dumps(publish) + "\n")
    summary = {
        "held_out_accuracy_before": 0.25,
        "held_out_accuracy_after": 0.75,
        "evaluation_before": {"aime24": averages(0.2)},
        "evaluation_after": {"aime24": averages(0.4)},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    noise = {"evaluation": 2.5e-5, "rollout": 1.3e-4}
    noise = {name: {"kl_behaviour_proximal_k3": value} for name, value in noise.items()}
    (run_dir / "noise.json").write_text(json.dumps(noise))
    return run_dir


class Page(HTMLParser):
    """The captions, and every address a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "figure":
            self.pictures.append(named["aria-label"] or "")
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        for name, value in attrs:
            inside = (value or "").startswith(("#", "data:"))
            if name in ("src", "href", "xlink:href") and not inside:
                self.fetched.append(f"{name}={value}")


def test_a_page_on_two_runs_has_both_everywhere_and_fetches_nothing(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    write_report(runs, tmp_path / "pages" / "index.html")
    text = (tmp_path / "pages" / "index.html").read_text()
    page = Page(text)
    assert page.fetched == []
    assert not re.search(r"url\((?!#)|@import", text)
    for name in ("first", "second"):
        assert f"Where a step's time goes: {name}" in page.pictures
        assert f"Quantization error (Eq. 14): {name}" in page.pictures
    assert "KL(behaviour, proximal), k3" in page.pictures
    assert "Evaluation: aime24" in page.pictures
    for shown in ("25.0%", "75.0%", "1,342,464", "40 of 100", "20.0% \u00b1 6.2% \u2192 40.0%"):
        assert text.count(shown) >= 2
    identifiers = re.findall(r'clipPath id="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers)) > 10


@pytest.mark.parametrize(
    ("late", "words"),
    [
        ({}, "Nothing here speaks against quantized rollout"),
        (
            {"kl_behaviour_proximal_k3": 2e-3, "tis_truncated_fraction": 0.02},
            "grew 20-fold and 2.0% of tokens",
        ),
        ({"kl_behaviour_proximal_k3": 2e-3}, "Nothing here speaks against"),
        ({"code_flip_fraction": 1e-5}, "raise quantization.uaq.scale"),
        ({"response_truncated_fraction": 0.3}, "30% of completions are cut off"),
        ({"verifier_failures": 100}, "of verifier calls fail"),
    ],
)
def test_advice_follows_its_rules(late: dict[str, float], words: str, tmp_path: Path) -> None:
    (sentence,) = advice(read_run(write_run(tmp_path / "run", late=late)))
    assert words in sentence and "(Rule:" in sentence


def test_a_gap_that_was_large_from_the_start_speaks_against_naive_alone(tmp_path: Path) -> None:
    for objective, words in [("naive", "naive ignores it"), ("acr", "Nothing here speaks against")]:
        config = with_overrides(Config(), [f"objective.objective={objective}"])
        late = {"kl_behaviour_proximal_k3": 2e-2}
        run_dir = write_run(tmp_path / objective, late=late, config=config)
        (sentence,) = advice(read_run(run_dir))
        assert words in sentence and "(Rule:" in sentence


def test_pictures_name_what_the_runs_have(tmp_path: Path) -> None:
    ppo = with_overrides(Config(), ["advantage_estimator=gae"])
    runs = [write_run(tmp_path / "first"), write_run(tmp_path / "second", config=ppo)]
    for run_dirs, with_key, with_critic in ((runs[:1], 0, 0), (runs, 1, 1)):
        write_report(run_dirs, tmp_path / "index.html")
        text = (tmp_path / "index.html").read_text()
        assert text.count('<p id="key">') == with_key
        assert text.count(">critic</text>") == with_critic


def test_a_run_that_is_still_going_has_a_page(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "summary.json").unlink()
    (run_dir / "weights.jsonl").unlink()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "rew')  # being written
    write_report([run_dir], tmp_path / "index.html")
    assert "not measured" in (tmp_path / "index.html").read_text()


def test_engine_noise_stands_apart_from_what_is_rolled_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    write_report([run_dir], tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert "engine alone (BF16)</th><td>2.5e-05<" in page
    assert "as rolled out</th><td>1.3e-04<" in page
    assert "engine alone, before training" in page
    (run_dir / "noise.json").unlink()
    write_report([run_dir], tmp_path / "index.html")
    assert "engine alone, before training" not in (tmp_path / "index.html").read_text()


def test_evaluations_are_in_the_order_they_were_made(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    found = read_run(run_dir).evaluations()["aime24"]
    assert [(step, a["Avg@1"]["mean"]) for step, a in found.items()] == [
        (0, 0.2),
        (20, 0.3),
        (40, 0.4),
    ]
    (run_dir / "summary.json").unlink()  # still going
    assert list(read_run(run_dir).evaluations()["aime24"]) == [20]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no config.yaml"):
        read_run(tmp_path)
    save(Config(), tmp_path / "config.yaml")
    with pytest.raises(ReportError, match="no step is done"):
        read_run(tmp_path)


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here to open the page: apt install chromium"
)
@pytest.mark.parametrize(("dark", "paper"), [(False, (255, 255, 255)), (True, (22, 24, 28))])
def test_a_browser_draws_it_on_light_and_dark(
    dark: bool, paper: tuple[int, int, int], tmp_path: Path
) -> None:
    write_report([write_run(tmp_path / "run")], tmp_path / "index.html")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    flags += "--disable-background-networking --disable-component-update --window-size=1250,1600 "
    flags += "--blink-settings=preferredColorScheme=0 --force-dark-mode" if dark else ""
    subprocess.run(
        [
            str(CHROMIUM),
            *flags.split(),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--screenshot={tmp_path / 'page.png'}",
            f"file://{tmp_path / 'index.html'}",
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    picture = Image.open(tmp_path / "page.png").convert("RGB")
    colours = {colour: count for count, colour in picture.getcolors(2**24)}
    assert max(colours, key=lambda colour: colours[colour]) == paper
    ink = (230, 230, 230) if dark else (26, 26, 26)
    assert colours[ink] > 1000  # letters and axes
    assert colours[(43, 140, 214)] > 1000  # curves
