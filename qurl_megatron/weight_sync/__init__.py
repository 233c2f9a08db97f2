"""Sending the learner's weights to the servers, and writing them as Hugging Face directories."""
