"""Which session uses which stored blocks, and for how long. No I/O, no vLLM, one thread."""
