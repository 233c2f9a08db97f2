"""`objective.advantage_estimator=gae`: PPO, whose critic estimates what a token was worth."""
