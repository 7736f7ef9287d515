"""What to provision for a model and a workload: pure functions, without an engine."""
