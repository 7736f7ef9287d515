"""Token counts from the text that ``/metrics`` serves."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from spm.demo import metrics_client
from spm.demo.metrics_client import (
    TokenSources,
    parse_sources,
    settled_sources,
)

ONE_ENGINE = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="local_compute"} 1376.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="local_cache_hit"} 64.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="external_kv_transfer"} 96.0
vllm:prompt_tokens_total{engine="0",model_name="demo"} 1536.0
# TYPE spm:loaded_tokens_total counter
spm:loaded_tokens_total{engine="0",model_name="demo",tier="host"} 32.0
spm:loaded_tokens_total{engine="0",model_name="demo",tier="remote"} 64.0
spm:loaded_tokens_created{engine="0",model_name="demo",tier="remote"} 1.7e+09
"""


def computed(labels: str, value: str = "7.0") -> str:
    return f"vllm:prompt_tokens_by_source_total{{{labels}}} {value}\n"


def test_each_counter_goes_to_its_source() -> None:
    assert parse_sources(ONE_ENGINE) == TokenSources(
        gpu=64, external=96, computed=1376, host=32, remote=64
    )


def test_engines_are_added_up() -> None:
    second = ONE_ENGINE.replace('engine="0"', 'engine="1"')
    assert parse_sources(ONE_ENGINE + second) == TokenSources(
        gpu=128, external=192, computed=2752, host=64, remote=128
    )


def test_without_the_connector_its_counters_are_zero() -> None:
    text = "".join(x for x in ONE_ENGINE.splitlines(keepends=True) if "spm:" not in x)
    assert parse_sources(text) == TokenSources(gpu=64, external=96, computed=1376)


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n", "python_info 1.0\n"])
def test_absent_metrics_are_zero(text: str) -> None:
    assert parse_sources(text) == TokenSources()


@pytest.mark.parametrize(
    "model_name",
    [
        r"say \"hi\"",
        r"C:\\models\\",
        "a{b} 3.0",
        r"x\",source=\"local_cache_hit",
        r"x\"source=",
        "a,b=c",
        r"two\nlines",
    ],
)
def test_odd_characters_in_another_label_change_nothing(model_name: str) -> None:
    text = computed(f'model_name="{model_name}",source="local_compute"')
    assert parse_sources(text) == TokenSources(computed=7)


def test_the_order_of_labels_and_a_timestamp_change_nothing() -> None:
    text = computed('source="local_compute",engine="0"', "7.0 1712345678000")
    assert parse_sources(text) == TokenSources(computed=7)


def test_large_counters_in_exponent_form_are_read() -> None:
    assert parse_sources(computed('source="local_compute"', "1.5e+06")).computed == 1_500_000


def test_what_somebody_elses_connector_loaded_is_remote_as_its_tiers_are_not_told() -> None:
    sources = parse_sources(ONE_ENGINE.replace("tier", "other"), tiers=False)
    assert sources == TokenSources(gpu=64, external=96, computed=1376, remote=96)
    assert sources.accounts_for(64 + 96 + 1376)


def test_metrics_with_a_similar_name_do_not_count() -> None:
    text = computed('source="local_compute"').replace("source_total", "source_total_seconds")
    assert parse_sources(text) == TokenSources()


def test_a_difference_is_taken_source_by_source() -> None:
    after = TokenSources(gpu=10, external=20, computed=30, host=12, remote=8)
    before = TokenSources(gpu=1, external=2, computed=3, host=1, remote=1)
    assert after - before == TokenSources(gpu=9, external=18, computed=27, host=11, remote=7)


@pytest.mark.parametrize(
    ("sources", "complete"),
    [
        (TokenSources(gpu=32, computed=8), True),
        (TokenSources(external=32, host=20, remote=12, computed=8), True),
        (TokenSources(external=32, host=20, computed=8), False),
        (TokenSources(gpu=32), False),
        (TokenSources(gpu=32, computed=9), False),
    ],
)
def test_a_prompt_is_accounted_for_when_all_tokens_and_tiers_add_up(
    sources: TokenSources, complete: bool
) -> None:
    assert sources.accounts_for(40) is complete


def settle(
    pages: list[str], before: TokenSources, prompt_tokens: int, *, tiers: bool = True
) -> TokenSources:
    """Ask a server that shows one page after the other, and stays at the last."""
    left = list(pages)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=left.pop(0) if len(left) > 1 else left[0])

    async def run() -> TokenSources:
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            url = str(server.make_url("")).rstrip("/")
            return await settled_sources(http, url, before, prompt_tokens, tiers=tiers)

    return asyncio.run(run())


def test_counters_that_trail_the_answer_are_waited_for() -> None:
    late = ONE_ENGINE.replace("tier", "other")
    before = TokenSources(computed=1000)
    sources = settle([late, late, ONE_ENGINE], before, 64 + 96 + 376)
    assert sources == TokenSources(gpu=64, external=96, computed=376, host=32, remote=64)


def test_somebody_elses_connector_is_waited_for_by_vllms_counters_alone() -> None:
    plain = ONE_ENGINE.replace("spm:", "other:")
    late = plain.replace("external_kv_transfer", "other")
    sources = settle([late, plain], TokenSources(), 64 + 96 + 1376, tiers=False)
    assert (sources.external, sources.host, sources.remote) == (96, 0, 96)


def test_counters_that_never_add_up_are_returned_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_client, "_SETTLE_TIMEOUT_S", 0.15)
    assert settle([ONE_ENGINE], TokenSources(), 5000) == parse_sources(ONE_ENGINE)
