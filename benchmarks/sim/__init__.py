"""A discrete-event simulation in virtual time around vLLM's real scheduler and our real code.

Simulated are the model (how long a step takes), the link to host memory, and the agents. Real are
vLLM's ``Scheduler``, ``KVCacheManager`` and ``BlockPool``, and all of the connector's scheduler
side: SAM, SPM, prefetches, offloads and saves.
"""
