"""Agent workloads, the same for the real engine and for the simulated one."""
