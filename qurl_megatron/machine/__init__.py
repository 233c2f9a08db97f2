"""This machine, without torch: its network, environment, memory, disks, processes and output."""
