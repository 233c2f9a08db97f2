"""A study of objectives and UAQ on small policies, many seeds at once."""
