"""SessionAwareManager: the engine side of vLLM RFC #52113.

Everything here runs on vLLM's scheduler thread. ``free_queue`` is the order in which vLLM
takes blocks, ``block_table`` says which sessions claim a block and how strongly,
``manager`` turns hints and management requests into claims.
"""
