"""Build the learner on Transformer Engine's layers without a GPU: names, shapes, checkpoints.

    python tests/transformer_engine_program.py DIRECTORY

Transformer Engine's Python is real: the wheel without its compiled parts, from a directory of its
own, because megatron.core uses Transformer Engine wherever it can be imported. A stand-in takes the
place of the compiled extension, so nothing can be computed.
`tests/test_transformer_engine_layers.py` runs this file and knows what DIRECTORY holds.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

import transformer_engine_models as models


class StandIn(ModuleType):
    """Transformer Engine's compiled extension: any name is a dummy, and nothing computes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.get_cudnn_version = lambda: 91000

    def __getattr__(self, name: str) -> mock.MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        dummy = mock.MagicMock(name=name)
        setattr(self, name, dummy)
        return dummy


def install_stand_in() -> None:
    """Import Transformer Engine with the stand-in for its compiled extension."""
    extension = StandIn("transformer_engine_torch")
    sys.modules[extension.__name__] = extension
    # It needs a dependency of the wheel to export models to ONNX.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()
    import transformer_engine.common as common

    with mock.patch.object(common, "load_framework_extension"), gpu_is_claimed():
        import transformer_engine.pytorch  # noqa: F401


@contextmanager
def gpu_is_claimed() -> Iterator[None]:
    """Let torch say that there is a Hopper GPU, without which Transformer Engine builds nothing."""
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    with ExitStack() as patches:
        for name, value in {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_properties": hopper,
            "get_device_capability": (9, 0),
            "init": None,
            "_lazy_init": None,
        }.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        yield


def is_linear(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("megatron.core.extensions") and "Linear" in str(
        type(module)
    )


def report_model(directory: Path) -> dict[str, Any]:
    """Load a checkpoint of local layers, save it again, and return what the learner holds."""
    from qurl_megatron.learner.checkpoint import Checkpoints

    config = models.config_of(directory)
    with gpu_is_claimed():
        learner = models.learner_of(config)
    (chunk,) = learner.chunks
    report = {
        "layer": type(chunk.module.decoder.layers[0].self_attention.linear_qkv).__name__,
        "fuses": [m.fuse_wgrad_accumulation for m in chunk.modules() if is_linear(m)],
        "adam": type(learner.optimizer.chained_optimizers[0].optimizer).__module__,
        "shapes": {name: tuple(p.shape) for name, p in chunk.module.named_parameters()},
        "rules": [rule.megatron_names[0] for rule, *_ in learner.shards()],
    }
    config.output_dir = str(directory / "saved by Transformer Engine")
    checkpoints = Checkpoints(config, learner)
    checkpoints.restore(models.checkpoint_of(models.config_of(directory)))
    report["masters"] = models.masters_of(learner)
    checkpoints.save(models.state_of_step_1())
    checkpoints.poll(wait=True)
    checkpoints.close()
    learner.close()
    return report


def main(directory: Path) -> None:
    """Write the reports to DIRECTORY/reports.pt."""
    from qurl_megatron import device

    assert device.accelerator() == "cpu"  # remembered: only Transformer Engine hears of a GPU
    install_stand_in()
    from qurl_megatron.learner import layers

    with mock.patch.object(layers, "has_transformer_engine", return_value=True):
        reports: dict[str, Any] = {
            name: report_model(directory / name) for name in sorted(models.MODELS)
        }
    torch.save(reports, directory / "reports.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
