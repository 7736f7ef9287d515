"""Policies to compare: one small class each."""
