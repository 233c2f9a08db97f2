"""How the learner's weights reach the servers, and Hugging Face directories."""
