"""The mathematics of one step: batches, advantages and the policy objective. Pure PyTorch."""
