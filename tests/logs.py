"""A run's log, the directory of a run that was never run, and a parser of its report."""

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import save
from qurl_megatron.report.metrics import Evaluation, StepMetrics
from qurl_megatron.report.run_log import RunLog

ZEROS: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(StepMetrics)}
ZEROS |= {
    "held_out_accuracy": None,
    "held_out_standard_error": None,
    "evaluation": None,
    "reward_counts": [(0.0, 1), (1.0, 3)],
}
ZEROS |= {"verifier_failure": "", "by_staleness": None, "reward_parts": {}, "objective_parts": {}}
ZEROS |= {"episode_ends": None, "episode_failure": "", "prefix_cached_by_turn": None}
ZEROS |= {"update_shown_fraction": None}
GOOD: dict[str, Any] = ZEROS | {  # a step that no rule of the report's advice objects to
    "entropy": 1.0,
    "grad_norm": 0.5,
    "learning_rate": 1e-6,
    "code_flip_fraction": 0.1,
    "kl_behaviour_proximal_k3": 1e-4,
    "tis_truncated_fraction": 0.02,
    "equal_reward_fraction": 0.5,
}


def run_log(run_dir: Path, **fields: Any) -> RunLog:
    """Return the log of a run of ten steps in this directory."""
    config = Config(output_dir=str(run_dir.parent), name=run_dir.name, steps=10, **fields)
    return RunLog(config, writes=True)


def evaluation(mean: float) -> Evaluation:
    average = {"mean": mean, "standard_error": 0.01}
    files = {"aime": {"Avg@1": average, "Avg@4 sampled": average}}
    return Evaluation(mean, files, 0.02)


def write(log: RunLog, step: int, **measured: float) -> None:
    """Log one step, with an evaluation if its number is even."""
    values = ZEROS | {"step": step, "weight_version": step + 1} | measured
    log.write(StepMetrics(**values), evaluation(step / 10) if step % 2 == 0 else None)
    log.write_weights(step + 1, {"weight": {"code_flip_fraction": 0.5}})


PROJECTIONS = [f"self_attn.{x}_proj" for x in "qkvo"] + [
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
]
WEIGHT_MEASURES = {
    "weight_update_norm": 1e-5,
    "weight_quant_error": 5e-5,
    "code_flip_fraction": 0.1,
}
PUBLISH = {**WEIGHT_MEASURES, "publish_bytes": 300_000, "publish_full_bytes": 1_342_464}
NOISE = {
    "evaluation": {"kl_behaviour_proximal_k3": 2.5e-5},
    "rollout": {"kl_behaviour_proximal_k3": 1.3e-4},
}


def averages(mean: float) -> dict[str, dict[str, float]]:
    return {
        "Avg@1": {"mean": mean, "standard_error": 0.0625},
        "Avg@32 sampled": {"mean": mean / 2, "standard_error": 0.03125},
    }


def write_run(
    run_dir: Path, *, late: dict[str, Any] | None = None, config: Config | None = None
) -> Path:
    """Write a complete run of 40 steps, evaluated before RL, at step 20 and after RL.

    `late` replaces metrics of the last ten steps.
    """
    run_dir.mkdir()
    save(config or Config(), run_dir / "config.yaml")
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            line = GOOD | PUBLISH | {"step": step, "reward_mean": step / 50}
            if step == 20:
                line |= {"held_out_accuracy": 0.5, "evaluation": {"aime24": averages(0.3)}}
            file.write(json.dumps(line | (late or {}) if step > 30 else line) + "\n")
    names = [f"model.layers.{n}.{p}.weight" for n in range(3) for p in PROJECTIONS]
    publish = {"weight_version": 41, "weights": dict.fromkeys(names, WEIGHT_MEASURES)}
    (run_dir / "weights.jsonl").write_text(json.dumps(publish) + "\n")
    summary = {
        "held_out_accuracy_before": 0.25,
        "held_out_accuracy_after": 0.75,
        "held_out_standard_error_before": 0.03125,
        "held_out_standard_error_after": None,  # of an older run
        **{"steps": 40, "time_s": 60.0, "weight_version": 41, "time_publish_s_mean": 0.1},
        **{"publish_bytes": 300_000, "publish_full_bytes": 1_342_464},
        "evaluation_before": {"aime24": averages(0.2)},
        "evaluation_after": {"aime24": averages(0.4)},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "mismatch.json").write_text(json.dumps(NOISE))
    return run_dir


class Page(HTMLParser):
    """A parser of a page's elements and text, plot captions, table cells and URLs that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()  # their names
        self.shown = ""
        self.captions: list[str] = []
        self.cells: dict[str, list[str]] = {}
        self.loaded: list[str] = []
        self._row: list[str] = []
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        self.attributes |= attributes.keys()
        if tag == "figure":
            self.captions.append(attributes["aria-label"] or "")
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)
        if tag == "tr":
            self._row = []
        for name, value in attrs:
            is_inline = (value or "").startswith(("#", "data:"))
            if name in ("src", "href", "xlink:href") and not is_inline:
                self.loaded.append(f"{name}={value}")

    def handle_data(self, data: str) -> None:
        self.shown += data
        self._row.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self.cells[self._row[0]] = self._row[1:]
