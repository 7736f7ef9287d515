"""The tenant of a request."""

import hashlib

import pytest
from starlette.datastructures import Headers

from spm.config import SamConfig
from spm.http.errors import RequestError
from spm.http.tenants import RequestTenants
from spm.tenancy import TenantVerifier
from tracker.ids import TenantId

SECRET = bytes(range(32))
BOTH = SamConfig(tenant_header="X-Tenant", tenant_from_api_key=True)


def tenant_of(sam: SamConfig, *headers: tuple[str, str], secret: bytes | None = SECRET) -> str:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return RequestTenants(sam, secret).tenant_of(Headers(raw=raw))


def test_nothing_configured_is_the_default_tenant_whatever_is_sent() -> None:
    sent = (("X-Tenant", "a"), ("Authorization", "Bearer k"))
    assert tenant_of(SamConfig(), *sent, secret=None) == "default"
    assert not SamConfig().tells_tenants


def test_the_header_wins_over_the_key() -> None:
    assert tenant_of(BOTH, ("X-Tenant", "a.B-1_"), ("Authorization", "Bearer k")) == "a.B-1_"
    assert BOTH.tells_tenants


@pytest.mark.parametrize("value", ["", " ", "a b", "a/b", "ä", "x" * 65, "a,b"])
def test_a_bad_name_is_refused(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        tenant_of(BOTH, ("X-Tenant", value))
    assert (caught.value.code, caught.value.param) == (400, "X-Tenant")


def test_two_names_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        tenant_of(BOTH, ("X-Tenant", "mine"), ("X-Tenant", "yours"))
    assert caught.value.code == 400


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_is_a_tenant(scheme: str) -> None:
    sam = SamConfig(tenant_from_api_key=True)
    expected = "key-" + hashlib.sha256(b"secret key").hexdigest()[:16]
    assert tenant_of(sam, ("Authorization", f"{scheme} secret key")) == expected


@pytest.mark.parametrize("value", ["Basic abc", "Bearer", "Bearer ", ""])
def test_no_key_is_the_default_tenant(value: str) -> None:
    assert tenant_of(SamConfig(tenant_from_api_key=True), ("Authorization", value)) == "default"


def test_a_tenant_that_cannot_be_proven_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        tenant_of(BOTH, ("X-Tenant", "a"), secret=None)
    assert (caught.value.code, caught.value.status) == (503, "failed")
    assert tenant_of(BOTH, ("X-Tenant", "default"), secret=None) == "default"
    assert tenant_of(BOTH, secret=None) == "default"


def test_the_engine_believes_the_claim() -> None:
    verifier = TenantVerifier()
    verifier.add_secret(SECRET)
    claim = RequestTenants(BOTH, SECRET).claim(TenantId("a"))
    assert verifier.tenant_of({"spm_tenant": claim}) == "a"
    assert RequestTenants(BOTH, SECRET).claim(TenantId("default")) is None
    assert RequestTenants(BOTH, None).claim(TenantId("a")) is None
