"""One real LMCache server with Redis for a module's tests, empty before each."""

from collections.abc import Iterator

import pytest
from vllm.v1.core import kv_cache_utils

from tests.connectors.lmcache.server_rig import Backend, LMCacheRig, running_backend


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with running_backend() as backend:
        yield backend


@pytest.fixture
def empty_backend(backend: Backend) -> Backend:
    backend.clear_host_tier()
    with backend.redis.client() as client:
        client.flushall()
    return backend


@pytest.fixture(params=[True, False], ids=["l2_url", "no_l2_url"])
def redis_known(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def rig(empty_backend: Backend, redis_known: bool) -> Iterator[LMCacheRig]:
    rig = LMCacheRig(empty_backend, redis_known=redis_known).ready()
    yield rig
    rig.pooling.check_integrity(idle=True)
    rig.pooling.close()


@pytest.fixture
def with_redis(empty_backend: Backend) -> Iterator[LMCacheRig]:
    rig = LMCacheRig(empty_backend, redis_known=True).ready()
    yield rig
    rig.pooling.check_integrity(idle=True)
    rig.pooling.close()


@pytest.fixture(autouse=True)
def vllms_hashes() -> Iterator[None]:
    """LMCache's in-process parts set up vLLM's block hashes anew, for all tests after these."""
    names = [name for name in ("NONE_HASH", "_NONE_HASH_SEED") if hasattr(kv_cache_utils, name)]
    before = {name: getattr(kv_cache_utils, name) for name in names}
    yield
    for name, value in before.items():
        setattr(kv_cache_utils, name, value)
