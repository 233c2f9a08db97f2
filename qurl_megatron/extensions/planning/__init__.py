"""`qurl plan`: the time that a run needs, before it starts, and the layout that needs least."""
