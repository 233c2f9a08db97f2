"""32B models on 8 to 256 GPUs: `qurl launch scaling_32b model=DIR data=FILE`.

Requirements:

- `model`: Qwen2.5-32B or Qwen3-32B as a Hugging Face directory.
- `data`: a jsonl file with `question` and `answer` on each line.

`study` returns the configuration for a model, a number of GPUs and a weight format. `recipe`
returns that for 64 GPUs and INT8.

Sources of the settings:

- The recipe `grpo`, which has the paper's settings for DeepScaleR's first stage.
- The layouts are this project's own, since the paper trains no model of this size. Learner and
  servers have whole nodes of eight GPUs. The planned steps are within a seventh of the shortest
  that `qurl plan` finds in the same placement; on 24 to 64 GPUs a colocated step is planned to be
  shorter. They were never run on GPUs. On up to 32 GPUs the optimizer is offloaded;
  otherwise the activations of Qwen3-32B for 8k tokens have no room.
- On 8 and 16 GPUs learner and servers take turns on all of them. Eight must be H200s; the others
  are H100s.
"""

from qurl_megatron.config.schema import (
    Config,
    EvaluationConfig,
    FormatName,
    LearnerConfig,
    QuantizationConfig,
    ServerConfig,
    UaqConfig,
)
from qurl_megatron.recipes import grpo

# Number of GPUs -> tensor-, pipeline- and data-parallel size, offloaded optimizer, GPUs per server.
LAYOUTS: dict[int, tuple[int, int, int, bool, int]] = {
    8: (4, 2, 1, True, 4),
    16: (4, 4, 1, True, 4),
    24: (4, 4, 1, True, 4),
    32: (4, 4, 1, True, 4),
    64: (8, 5, 1, False, 4),
    128: (4, 5, 4, False, 4),
    256: (4, 5, 8, False, 8),
}


def recipe() -> Config:
    return study("", 64, "int8")


def study(model: str, gpus: int, weight_format: FormatName) -> Config:
    """Return the configuration for a model on a number of GPUs in `LAYOUTS`.

    `model` is a directory or a name in `model.known`.
    """
    tensor, pipeline, data, offload, server = LAYOUTS[gpus]
    learner = LearnerConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        # Of five stages, four have thirteen layers, and the one with the output layer twelve.
        layers_in_last_pipeline_stage=12 if pipeline == 5 else None,
        micro_batch_size=1,
        offload_optimizer=offload,
    )
    config = with_servers(model, learner, gpus, server)
    config.quantization = QuantizationConfig(
        format=weight_format, uaq=UaqConfig(1.0 if weight_format == "bf16" else 1.5)
    )
    return config


def with_servers(model: str, learner: LearnerConfig, gpus: int, gpus_per_server: int) -> Config:
    """Return the recipe `grpo` for a model and a layout, with rollout servers on the other GPUs.

    If the learner has all GPUs, the servers take turns with it on them. There is no evaluation
    server, which held-out accuracy would need in BF16; `qurl eval` measures the checkpoints.
    """
    config = grpo.recipe()
    config.model, config.learner = model, learner
    others = gpus - learner.world_size
    config.rollout.placement = "separate" if others else "colocated"
    config.rollout.servers = (others or gpus) // gpus_per_server
    config.rollout.server = ServerConfig(gpus_per_server, max_running_requests=512)
    config.evaluation = EvaluationConfig(problems=0)
    return config
