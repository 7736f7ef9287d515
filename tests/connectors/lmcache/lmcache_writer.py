"""Stores chunks in a real ``lmcache server`` through LMCache's own client, without an engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.lmcache_server import LMCacheServer
from tests.processes import wait_until

MODEL = "some/model"
CHUNK_TOKENS = 256
BLOCK_TOKENS = 32
LAYERS, HEADS, HEAD_SIZE, BLOCKS = 2, 2, 16, 256


class LMCacheWriter:
    """The workers of one engine, as the server knows them."""

    def __init__(self, server: LMCacheServer, world_size: int) -> None:
        import torch
        import zmq
        from lmcache.integration.vllm.vllm_multi_process_adapter import (
            LMCacheMPWorkerAdapter,
            ParallelStrategy,
        )

        self._adapters: list[Any] = []
        for rank in range(world_size):
            strategy = ParallelStrategy(
                mla_only=False,
                vllm_world_size=world_size,
                vllm_worker_id=rank,
                tp_size=world_size,
                pp_size=1,
                n_servers=1,
            )
            adapter = LMCacheMPWorkerAdapter(
                server.url,
                zmq.Context.instance(),
                MODEL,
                BLOCK_TOKENS,
                strategy,
                heartbeat_interval=1.0,
            )
            shape = (BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
            layers = {f"layers.{at}": torch.randn(shape) for at in range(LAYERS)}
            adapter.register_kv_caches(layers, layout_hints={})
            self._adapters.append(adapter)
        self._requests = 0

    def store(self, tokens: Sequence[int], cache_salt: str = "") -> None:
        """Store the whole chunks of ``tokens``, as engines do, on all ranks. The server has them
        when this returns, its second tier a moment later."""
        from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

        wait_until(lambda: all(one.is_healthy for one in self._adapters), "a healthy server")
        self._requests += 1
        name, stop = f"request-{self._requests}", len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
        for adapter in self._adapters:
            order = LoadStoreOp(list(tokens), [list(range(stop // BLOCK_TOKENS))], 0, stop)
            adapter.submit_store_request(
                name, order, adapter.create_recorded_event(), cache_salt=cache_salt
            )
        wait_until(lambda: all(map(_idle, self._adapters)), "the end of a store")

    def close(self) -> None:
        """As engines do when they stop."""
        for adapter in self._adapters:
            adapter.shutdown()


def _idle(adapter: Any) -> bool:  # noqa: ANN401
    adapter.get_finished(set())
    return not adapter.store_futures


@contextmanager
def writing(server: LMCacheServer, world_size: int = 1) -> Iterator[LMCacheWriter]:
    """The workers of an engine that are there meanwhile."""
    writer = LMCacheWriter(server, world_size)
    try:
        yield writer
    finally:
        writer.close()
