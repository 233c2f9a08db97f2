"""A run's records, and the HTML page about them."""
