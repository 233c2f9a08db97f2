"""Problems, the prompts made of them, and the verifiers that score completions."""
