"""`qurl rehearse`: ranks of a learner on GPUs that do not exist: real code, fake tensors."""
