"""No tenant finds another's KV, nor learns from an answer's time whether it is there."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.config import SamConfig
from spm.hints import DEFAULT_TENANT
from spm.http.rewriting import decide, may_have_salt
from spm.tenancy import tenant_salt
from tracker.ids import TenantId

TOLD = SamConfig(tenant_header="X-Tenant")
A, B = TenantId("a"), TenantId("b")
TEXT = st.text(st.characters(exclude_categories=()), min_size=1, max_size=40)
VALID = TEXT.filter(lambda text: not set(text) & set("@/\\\0"))


def salt_of(tenant: TenantId, sam: SamConfig = TOLD, **fields: Any) -> object:  # noqa: ANN401
    body = json.dumps({"prompt": "p", **fields}).encode()
    claim = None if tenant == DEFAULT_TENANT else {"id": tenant, "proof": "00"}
    decided = decide(body, sam, claim, tenant)
    assert decided is None or isinstance(decided, bytes)
    return json.loads(decided or body).get("cache_salt")


def test_each_tenant_has_its_own() -> None:
    salts = {salt_of(A), salt_of(B), salt_of(A, cache_salt="x"), salt_of(B, cache_salt="x")}
    assert len(salts) == 4
    assert salt_of(A) == salt_of(A) == tenant_salt(A, None)


@given(VALID, st.sampled_from([A, B, DEFAULT_TENANT]))
def test_none_can_be_forged(own: str, tenant: TenantId) -> None:
    others = {A, B, DEFAULT_TENANT} - {tenant}
    for guess in (own, *(tenant_salt(other, None) for other in others)):
        mine = salt_of(tenant, cache_salt=guess)
        assert mine == tenant_salt(tenant, guess) != guess
        assert mine not in {tenant_salt(other, one) for other in others for one in (None, guess)}


def test_the_default_tenant_needs_none() -> None:
    assert salt_of(DEFAULT_TENANT) is None
    assert salt_of(DEFAULT_TENANT, cache_salt="x") == tenant_salt(DEFAULT_TENANT, "x")


@pytest.mark.parametrize("bad", ["", 5, "a" * 129, "a@b", "a/b", [], {}])
def test_what_vllm_refuses_is_left_for_it_to_refuse(bad: object) -> None:
    assert salt_of(A, cache_salt=bad) == bad


@pytest.mark.parametrize(
    "sam", [SamConfig(), SamConfig(tenant_header="T", tenant_cache_salt=False)]
)
def test_switched_off_a_salt_is_the_clients_own(sam: SamConfig) -> None:
    assert salt_of(A, sam, cache_salt="x") == "x"
    assert salt_of(A, sam) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt": "x"}',
        rb'{"cache\u005fsalt": "x"}',
        rb'{"\u0063ache_salt": "x"}',
        '{"cache_salt": "x"}'.encode("utf-16"),
        '{"cache_salt": "x"}'.encode("utf-32-le"),
    ],
)
def test_however_it_is_written_it_is_seen(body: bytes) -> None:
    assert json.loads(body) == {"cache_salt": "x"}
    assert may_have_salt(body)
    decided = decide(body, TOLD, None, DEFAULT_TENANT)
    assert isinstance(decided, bytes)
    assert json.loads(decided) == {"cache_salt": tenant_salt(DEFAULT_TENANT, "x")}
