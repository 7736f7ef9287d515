"""What metrics pages are taken to say, and that a healthy one is left in peace."""

import pytest

from spm.metrics import Metric
from spm.plan import advice as advice_module
from spm.plan.advice import advise

_HEALTHY = """\
# HELP spm:sam_active x
# TYPE spm:sam_active gauge
spm:sam_active{engine="0",model_name="m"} 1.0
spm:hints_total{engine="0",outcome="acted"} 500.0
spm:saved_blocks_total{engine="0",tier="host"} 1000.0
spm:loaded_blocks_total{engine="0",tier="host"} 900.0
spm:loaded_blocks_total{engine="0",tier="remote"} 100.0
spm:lookups_total{engine="0",outcome="answered"} 300.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:num_requests_waiting{engine="0"} 0.0
vllm:request_success_total{finished_reason="stop"} 1000.0
vllm:num_preemptions_total{engine="0"} 0.0
"""


def test_a_healthy_server_is_left_in_peace() -> None:
    assert advise(_HEALTHY) == []


def test_a_server_without_the_connector_is_told_so() -> None:
    (only,) = advise("vllm:num_requests_waiting 3.0\n")
    assert "--kv-transfer-config" in only.change


@pytest.mark.parametrize(
    ("line", "change", "number"),
    [
        ('spm:breaker_openings_total{side="worker"} 3.0', "remote store", "3 times"),
        ('spm:remote_skipped_total{reason="slow"} 40.0', "faster link", "40 requests"),
        ('spm:load_failed_blocks_total{reason="missing"} 50.0', "maxmemory", "50 blocks"),
        (
            'spm:saves_skipped_blocks_total{reason="queue_full"} 60.0',
            "save_inflight_bytes",
            "60 blocks",
        ),
        ('spm:saves_skipped_blocks_total{reason="no_buffer"} 60.0', "staging_bytes", "60 blocks"),
        ('spm:hints_total{outcome="malformed"} 30.0', "mend the hints", "30 hints"),
        ('spm:hints_total{outcome="clipped"} 30.0', "max_protected_share", "30 hints"),
        ("spm:sam_overridden_blocks_total 70.0", "shorter TTLs", "70 protected"),
        ('spm:lookups_total{outcome="late"} 20.0', "lookup_deadline_s", "20 questions"),
        ('vllm:num_preemptions_total{engine="1"} 90.0', "larger pool", "90 preemptions"),
    ],
)
def test_each_number_leads_to_its_advice(line: str, change: str, number: str) -> None:
    (only,) = advise(_HEALTHY + line + "\n")
    assert change in only.change
    assert number in only.why


def test_a_full_pool_with_requests_waiting_is_shown_the_gate() -> None:
    page = _HEALTHY.replace('perc{engine="0"} 0.5', 'perc{engine="0"} 0.99')
    page = page.replace('waiting{engine="0"} 0.0', 'waiting{engine="0"} 7.0')
    (only,) = advise(page)
    assert "resume_first_s" in only.change
    assert "7 requests" in only.why
    assert advise(page + "spm:admissions_held_total 1.0\n") == []


@pytest.mark.parametrize("text", ["", "garbage", "spm:x{ 1\n", 'spm:sam_active{a="b"} NaN-ish\n'])
def test_garbage_is_no_crash(text: str) -> None:
    assert isinstance(advise(text), list)


def test_every_metric_of_ours_that_is_looked_at_exists() -> None:
    known = {metric.value.name for metric in Metric}
    with open(advice_module.__file__) as source:
        named = {
            word.split('"')[0].removesuffix("_total")
            for word in source.read().replace("'", '"').split('"')
            if word.startswith("spm:") and " " not in word and len(word) > 4
        }
    assert named
    assert named <= known
