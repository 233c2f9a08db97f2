"""The learner's weights on their way to the servers, and to Hugging Face directories."""
