"""Three minutes of the soak, and that its judge sees one wrong block."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import soak_stock
from benchmarks.soak_chain import Chain, write_chains
from benchmarks.soak_schedule import FaultKind
from benchmarks.soak_verdicts import tolerance_of, wrong_tokens
from spm.value_format import HEADER_BYTES
from tests.e2e.engine_process import EngineProcess
from tests.e2e.made_models import FULL, made_model
from tests.e2e.stock import Stock, fill
from tests.e2e.tampering import signed, write_values
from tests.redis_server import EXECUTABLE, RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
_BLOCK = 3
"""The one block that is wrong: amid the prompt."""
_REPLY_TOKENS = 12


def _one_percent_more(payload: bytes) -> bytes:
    numbers = struct.unpack(f"<{len(payload) // 4}f", payload)
    return struct.pack(f"<{len(numbers)}f", *(1.01 * one for one in numbers))


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "none": lambda own, other: own,
    "another block's": lambda own, other: other,
    "empty": lambda own, other: bytes(len(own)),
    "one percent more": lambda own, other: _one_percent_more(own),
}
"""From the payloads of one block and of another: what is stored in the place of the first."""


def _resumed(engine: EngineProcess, stock: Stock, label: str) -> Chain:
    """What an engine generates whose prompt comes from Redis, all of it that can."""
    assert engine.drop_gpu_cache()
    exchange = stock.first[0]
    turn = engine.one(exchange.prompt, exchange.session, _REPLY_TOKENS)
    assert turn.cached_tokens // 32 > _BLOCK, "not from Redis"
    chain = Chain(list(exchange.prompt))
    chain.add_reply(turn.token_ids, turn.logprobs, label)
    return chain


@pytest.mark.timeout(400)
def test_the_judge_sees_one_wrong_block(
    stock: Stock, models: Path, redis: RedisServer, tmp_path: Path
) -> None:
    chains = []
    with EngineProcess(stock.engine(redis.tcp_url)) as engine, redis.client() as client:
        fill(engine, stock)
        ((names),) = engine.stored_names(stock.first[0].session)
        name, other = names[_BLOCK], client.get(names[_BLOCK + 1])
        value = client.get(name)
        assert isinstance(value, bytes)
        assert isinstance(other, bytes)
        for label, damage in DAMAGES.items():
            payload = damage(value[HEADER_BYTES:], other[HEADER_BYTES:])
            wrong_value = {name.encode(): value[:HEADER_BYTES] + payload}
            write_values(client, signed(wrong_value, None))  # passes every check
            chains.append(_resumed(engine, stock, label))
    paths = tmp_path / "chains", tmp_path / "said"
    write_chains(paths[0], chains)
    command = [sys.executable, soak_stock.__file__, str(made_model(FULL, models)), *map(str, paths)]
    subprocess.run(command, check=True, env={**os.environ, **soak_stock.stock_environment()})
    own, judged = soak_stock.read_judged(*paths)
    wrong = {
        chain.replies[0].label: len(list(wrong_tokens(chain, said, tolerance_of([own]))))
        for chain, said in judged
    }
    assert wrong.pop("none") == 0
    assert wrong.keys() == DAMAGES.keys() - {"none"}
    assert all(count > _REPLY_TOKENS // 2 for count in wrong.values()), wrong


@pytest.mark.timeout(600)
@pytest.mark.skipif(EXECUTABLE is None, reason="no redis-server on the path")
def test_a_soak_of_three_minutes(tmp_path: Path) -> None:
    """Catches what no test of one thing at a time does: wrong tokens, lost requests and leaks
    under aborts, preemptions and failures of Redis that come together."""
    path = tmp_path / "soak.json"
    command = [sys.executable, str(_SOAK), "--minutes", "3", "--seed", "0", "--json", str(path)]
    ran = subprocess.run(command, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(path.read_text())
    counts = result["counts"]
    assert counts["faults_injected"] >= len(FaultKind)
    for met in ("preemptions", "host_loaded_tokens", "remote_loaded_tokens", "left_by_client"):
        assert counts[met] > 0, met
    # Pools and caches still grow to their size in three minutes: that memory does not grow any
    # more is for the long run to show.
    assert result["ratios"]["rss_second_half"]["median"] < 1.25
