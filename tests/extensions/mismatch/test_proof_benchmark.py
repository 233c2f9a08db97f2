"""Right servers pass the proof and wrong ones do not: on tiny models, and on a real one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.proof import SERVERS, Verdict, prompts_of, verdicts
from distributed import run_ranks
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.algorithm.proof import WrongRollouts, check_mismatch
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.model.architecture import Family
from tiny import EOS_TOKEN_ID, build_tiny_model


def found(
    model: Path, kinds: dict[WeightFormat, list[str]], temperature: float, num_prompts: int
) -> dict[tuple[str, str], Verdict]:
    """Return the verdict by format and kind of server."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(n), "", "", torch.randint(2, 200, (6,), generator=generator).tolist())
        for n in range(num_prompts)
    ]
    settings: Any = {"temperature": temperature, "stop_token_ids": [EOS_TOKEN_ID]}
    return {
        (weight_format, kind): verdict
        for weight_format, of_format in kinds.items()
        for kind, verdict in zip(
            of_format, verdicts(model, weight_format, of_format, prompts, **settings), strict=True
        )
    }


def test_a_tiny_model(tmp_path: Path) -> None:
    model = build_tiny_model(
        tmp_path / "model", "llama", intermediate_size=128, num_hidden_layers=3
    )
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        weight *= 3 if "up_proj" in name else 1  # else the scales of gate and up are nearly equal
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    kinds: dict[WeightFormat, list[str]] = {
        "int8": [*SERVERS],
        "int4-g32": ["right", "cold", "swapped"],
        "fp8": ["right", "raw"],
        "bf16": ["right", "warm"],
    }
    (by_kind,) = run_ranks(found, 1, model, kinds, 0.6, 12)
    for case, verdict in by_kind.items():
        assert bool(verdict.why) == ("right" not in case), case
    kinds_of_four = ("right", "right", "right", "swapped")
    sums = {f"rollout_{n}": by_kind["int8", kind].sums for n, kind in enumerate(kinds_of_four)}
    facts = {"quantizes_activations": True, "has_experts": False}
    with pytest.raises(WrongRollouts, match="server rollout_3's log-probs"):
        check_mismatch("rollout", "int8", sums, **facts)


@pytest.mark.parametrize(
    ("family", "weight_format"), [("qwen3_moe", "int8"), ("qwen3_5_text", "fp8")]
)
def test_experts_and_hybrids_that_are_right(
    tmp_path: Path, family: Family, weight_format: WeightFormat
) -> None:
    model = build_tiny_model(tmp_path / "model", family)
    (by_kind,) = run_ranks(found, 1, model, {weight_format: ["right", "warm"]}, 1.0, 24)
    for case, verdict in by_kind.items():
        assert bool(verdict.why) == ("right" not in case), case


def of_smollm2(model: Path) -> list[Verdict]:
    kinds, prompts = ["right", "raw"], prompts_of(model, 6)
    return list(verdicts(model, "int8", kinds, prompts, stop_token_ids=[2]))


def test_a_real_model(smollm2_dir: Path) -> None:
    """INT8 moves a token of it by 0.2 nats, and a toy's by 0.01."""
    ((right, raw),) = run_ranks(of_smollm2, 1, smollm2_dir, timeout_s=600)
    assert not right.why, right
    assert 0.5 < right.mean("difference") / right.mean("predicted") < 1.5
    assert 0.05 < right.mean("difference")
    assert raw.why
