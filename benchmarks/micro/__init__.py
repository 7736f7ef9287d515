"""Costs of single operations, and how they grow: run by ``benchmarks/micro/run.py``."""
