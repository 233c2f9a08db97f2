"""`rollout.agent=FILE.py:NAME`: a completion is an episode, which a function of the user plays."""
