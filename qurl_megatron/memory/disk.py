"""The disk that a run needs."""

import dataclasses
from pathlib import Path

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.machine.disk import free_bytes
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import stored_dtype
from qurl_megatron.model.weight_map import num_parameters
from qurl_megatron.report.record import list_checkpoints


def checkpoint_bytes(architecture: Architecture, config: Config) -> int:
    """Return the size of a run's checkpoint on disk, in bytes.

    A parameter of the policy, or of PPO's critic, takes 4 B of float32 master weight and 8 B of
    Adam's moments. A bfloat16 model is saved too, in 2 B.
    """
    per_value = 12 if config.learner.dtype == "float32" else 14
    values = num_parameters(architecture)
    if config.objective.advantage_estimator == "gae":
        critic = config.critic.model
        values += num_parameters(Architecture.from_directory(critic)) if critic else values
    if rank := config.adapters.rank:  # only adapters are saved
        values = num_parameters(dataclasses.replace(architecture, adapter_rank=rank)) - values
    return per_value * values


def check_disk(config: Config) -> str:
    """Return one line about what a run will still write and what is free.

    The disk holds at once the last checkpoints, that of the best evaluation, one that is being
    written, and the final model. Logs and samples are small beside them and are not counted.

    Raises:
        ConfigError: less disk is free than the run needs.
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
            f"output_dir={config.output_dir}: needs {need}; only {gigabytes(free)} are free; free "
            "some, give another directory, or lower checkpoint.keep_last"
        )
    return f"needs up to {need}; {gigabytes(free)} are free"
