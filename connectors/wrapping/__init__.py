"""Sessions over a connector that is not ours.

The wrapped connector loads and saves as it does alone. Beside it: sessions, hints and
retention in vLLM's own pool, and of the remote operations what can be done through the
connector's hooks, on behalf of stand-in requests that vLLM never sees.
"""
