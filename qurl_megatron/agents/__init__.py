"""Episodes of several turns, which functions of the user play."""
