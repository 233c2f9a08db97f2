"""The mathematics of a step: batches, advantages and the policy objective. Pure PyTorch."""
