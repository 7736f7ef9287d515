"""The demo: sessions that outlive the GPU cache of a real vLLM server.

Nothing here imports vLLM. The servers are processes of their own, and are driven over HTTP.
"""
