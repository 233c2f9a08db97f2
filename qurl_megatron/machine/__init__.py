"""This machine, without torch: its network, environment, memory, processes and output."""
