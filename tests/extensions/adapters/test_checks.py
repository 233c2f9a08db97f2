"""Runs of adapters that cannot be are refused before they begin; `test_refusals.py` has more."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qurl_megatron.config.schema import AdaptersConfig, Config, ConfigError, QuantizationConfig
from qurl_megatron.config.validate import check_base
from qurl_megatron.extensions.adapters.files import base_hash
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.resume import prepare_resume
from qurl_megatron.model.architecture import Architecture
from tiny import build_tiny_model


def test_adapters_over_a_hybrid_are_refused(tmp_path: Path) -> None:
    architecture = Architecture.from_directory(build_tiny_model(tmp_path / "m", "qwen3_5_text"))
    check_base(Config(), architecture)
    config = Config(adapters=AdaptersConfig(rank=8))
    with pytest.raises(ConfigError, match="adapters over linear attention are not supported"):
        check_base(config, architecture)


def test_a_learner_of_adapters_has_whole_groups_of_the_base(model_dir: Path) -> None:
    architecture = Architecture.from_directory(model_dir)
    quantization = QuantizationConfig(format="int4", group_size=32)
    config = Config(adapters=AdaptersConfig(rank=4), quantization=quantization)
    check_base(config, architecture)
    config.learner.tensor_parallel_size = 4
    with pytest.raises(ConfigError, match=r"^learner.tensor_parallel_size=4: .*groups of int4"):
        check_base(config, architecture)


@pytest.mark.usefixtures("short_quickstart")
def test_adapters_are_resumed_over_their_own_base_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = prepare_new("quickstart_adapters", ["name=first"])
    prepare_resume(config.run_dir, [])  # without a checkpoint, there is nothing to compare
    checkpoint = config.run_dir / "checkpoints" / "step_000030"
    checkpoint.mkdir(parents=True)
    base = base_hash(Path(config.model), "int4-g32")
    (checkpoint / "state.json").write_text(json.dumps({"base": "another"}))
    prepare_resume(config.run_dir, [])  # no file is younger than the checkpoint
    (Path(config.model) / "config.json").touch()
    message = f"^model={config.model}: the adapters of {checkpoint} were trained over another base"
    with pytest.raises(ConfigError, match=message):
        prepare_resume(config.run_dir, [])
    (checkpoint / "state.json").write_text(json.dumps({"base": base}))
    (Path(config.model) / "config.json").touch()
    prepare_resume(config.run_dir, [])
    weights = Path(config.model) / "model.safetensors"
    other = {name: tensor + 0.01 for name, tensor in load_file(weights).items()}
    save_file(other, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        prepare_resume(config.run_dir, [], writes=False)
    prepare_resume(config.run_dir, [], asks_servers=False)  # a submission leaves it to the job
