"""A run that uses servers elsewhere, and what it needs of them."""

import dataclasses
from pathlib import Path
from typing import Any

from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.elsewhere import servers
from qurl_megatron.extensions.elsewhere.wire import Description
from qurl_megatron.model.architecture import Architecture

KEY = "0123456789abcdef"
KEPT = "model.layers.0.mlp.down_proj"


def config_of(model_dir: Path, *words: str) -> Config:
    return with_overrides(Config(model=str(model_dir)), list(words))


def description(model_dir: Path, **changes: Any) -> Description:
    words = ["rollout.max_prompt_length=50", "rollout.max_completion_length=50"]
    config = config_of(model_dir, *words, f"quantization.keep=[{KEPT}]")
    described = servers.description_of(Architecture.from_directory(model_dir), config)
    return dataclasses.replace(described, **changes)
