"""LMCache as the store: what a session can have done through its public control API and, of
what it keeps in Redis, under its own names.

KV itself is moved by LMCache's connector. Nothing here imports LMCache before it is used.
"""
