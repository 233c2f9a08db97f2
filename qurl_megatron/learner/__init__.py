"""The full-precision policy in Megatron-core: its model, optimizer steps and checkpoints."""

from qurl_megatron.machine.imports import without

# For its inference and its timers Megatron imports these where they are installed. They would take
# a quarter of the time of a rank's imports, and without a GPU's driver flash_mla has none.
with without("flash_mla", "flashinfer", "wandb"):
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
