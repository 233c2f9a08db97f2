"""The quickstart over an INT4 base: adapters (LoRA) of rank 16 learn to spell words backward.

Task, verifier and most settings are those of `quickstart`. The model that was shown some right
answers is quantized in groups of 32 and never changes again. Learner and servers hold the same
codes, so there is nothing for update-aware quantization (UAQ) to do. The learning rate is seven
times that of `quickstart`: adapters need more.
"""

from qurl_megatron.config.schema import AdaptersConfig, Config, QuantizationConfig
from qurl_megatron.recipes import quickstart


def recipe() -> Config:
    config = quickstart.recipe()
    config.adapters = AdaptersConfig(rank=16)
    config.quantization = QuantizationConfig(format="int4", group_size=32)
    config.optimizer.learning_rate = 2e-3
    return config
