"""The full-precision policy in Megatron-core: its model, optimizer steps and checkpoints."""

from qurl_megatron.machine.imports import without

# Megatron's inference and timers import these where they are installed. They would take a quarter
# of the time of a rank's imports, and flash_mla cannot be imported without a GPU's driver.
with without("flash_mla", "flashinfer", "wandb"):
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
