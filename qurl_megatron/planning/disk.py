"""The disk space that a run needs."""

from __future__ import annotations

from pathlib import Path

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.files import free_bytes, gigabytes, list_checkpoints
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import stored_dtype
from qurl_megatron.planning.memory import checkpoint_bytes, num_parameters


def check_disk(config: Config) -> str:
    """Return one line about what a run will still write and what is free.

    At the same time the disk holds the last checkpoints, that of the best evaluation, one that is
    being written, and the final model. Logs and samples are small beside them and are not counted.

    Raises:
        ConfigError: less is free.
    """
    model = Path(config.model)
    architecture = Architecture.from_directory(model)
    each = checkpoint_bytes(architecture, config)
    final = num_parameters(architecture) * stored_dtype(model).itemsize
    saves = config.checkpoint.every_steps > 0
    num_written = len(list_checkpoints(config.run_dir))
    num_kept = config.checkpoint.keep_last
    if config.checkpoint.keep_best and config.evaluation.enabled:
        num_kept += 1  # the best is not always among the last
    count = max(1, num_kept + 1 - num_written) if saves else 0
    needed, free = count * each + final, free_bytes(config.run_dir)
    need = f"{gigabytes(needed)} of disk for {count} checkpoints and the final model"
    if free < needed:
        raise ConfigError(
            f"output_dir={config.output_dir}: needs {need}, and has {gigabytes(free)} free; free "
            "some, give another directory, or lower checkpoint.keep_last"
        )
    return f"needs up to {need}; {gigabytes(free)} are free"
