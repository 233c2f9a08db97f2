"""Episodes of several turns, played by the user's own functions."""
