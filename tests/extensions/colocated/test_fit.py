"""Learner and servers in turn: what fits."""

from pathlib import Path

import pytest

from qurl_megatron.config.gpus import H100, Node
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.colocated.fit import settle
from qurl_megatron.model.architecture import Architecture
from tiny import write_7b


def test_turns_that_do_not_fit_are_refused_with_what_would(tmp_path: Path) -> None:
    write_7b(tmp_path)
    words = ["rollout.placement=colocated", f"model={tmp_path}", "learner.dtype=bfloat16"]
    words += ["rollout.server.mem_fraction_static=0.8", "evaluation.server.mem_fraction_static=0.8"]

    def check(*more: str, host_gb: int = 2000) -> str:
        config = with_overrides(Config(), [*words, *more])
        architecture = Architecture.from_directory(tmp_path)
        node = Node(H100, 8, host_gb * 10**9)
        settle(architecture, config, node)
        return config.rollout.server.releases

    eight = ["learner.tensor_parallel_size=8", "rollout.server.tensor_parallel_size=8"]
    assert check(*eight) == "cache"
    with pytest.raises(ConfigError, match=r"while learner rank 0 trains, .* of its GPU"):
        check()
    with pytest.raises(ConfigError, match=r"^rollout.server.mem_.*=0.95: .* at most 0\.8"):
        check(*eight, "rollout.server.mem_fraction_static=0.95")
    with pytest.raises(ConfigError, match=r"of host memory, and a node has 100 GB"):
        check(*eight, host_gb=100)
