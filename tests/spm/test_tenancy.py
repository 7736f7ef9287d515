"""Tenants are believed only with a proof, and a proof is good for nothing but its own tenant."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm import tenancy
from spm.tenancy import (
    MAX_PROOFS,
    MAX_SECRETS,
    SECRET_BYTES,
    TenantVerifier,
    parse_tenant,
    tenant_proof,
)
from tracker.ids import TenantId

SECRET, OTHER = bytes(range(32)), bytes(32)
A, B = TenantId("a"), TenantId("b")

tenants = st.text("abcXYZ019_.-", min_size=1, max_size=64).map(TenantId)
secrets = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


def claim(tenant: object, proof: object) -> dict[str, Any]:
    return {"spm_tenant": {"id": tenant, "proof": proof}}


def verifier(*known: bytes) -> TenantVerifier:
    one = TenantVerifier()
    for secret in known:
        assert one.add_secret(secret)
    return one


def numbered(number: int) -> bytes:
    return number.to_bytes(SECRET_BYTES, "big")


@given(tenants, secrets)
def test_a_proof_verifies_for_its_tenant_again_and_again(tenant: TenantId, secret: bytes) -> None:
    one = verifier(OTHER, secret)
    for _ in range(2):
        assert one.tenant_of(claim(tenant, tenant_proof(secret, tenant))) == tenant


@given(tenants, tenants, secrets)
def test_a_proof_never_verifies_for_another_tenant(
    mine: TenantId, wanted: TenantId, secret: bytes
) -> None:
    one = verifier(secret)
    proof = tenant_proof(secret, mine)
    assert one.tenant_of(claim(mine, proof)) == mine
    assert one.tenant_of(claim(wanted, proof)) == (mine if wanted == mine else None)


@given(tenants, secrets, secrets)
def test_a_proof_by_an_unknown_secret_is_nothing(
    tenant: TenantId, known: bytes, unknown: bytes
) -> None:
    believed = verifier(known).tenant_of(claim(tenant, tenant_proof(unknown, tenant)))
    assert believed == (tenant if known == unknown else None)


def test_a_proof_is_64_hex_digits_and_tells_tenants_and_secrets_apart() -> None:
    proofs = {tenant_proof(secret, tenant) for secret in (SECRET, OTHER) for tenant in (A, B)}
    assert len(proofs) == 4
    assert all(len(proof) == 64 and set(proof) <= set("0123456789abcdef") for proof in proofs)


def test_the_proof_is_the_same_in_every_process_and_release() -> None:
    """API servers and engines need not be restarted together."""
    assert tenant_proof(SECRET, A) == (
        "e35a92976fb331bf35e524bc3ce59e71f1277b9c20f6a744c9c99dd928775894"
    )


def test_nobody_is_believed_before_a_secret_is_registered() -> None:
    one = TenantVerifier()
    sent = claim(A, tenant_proof(SECRET, A))
    assert one.tenant_of(sent) is None
    one.add_secret(SECRET)
    assert one.tenant_of(sent) == A


@given(JSON | st.fixed_dictionaries({"id": JSON, "proof": JSON}))
def test_whatever_else_is_sent_is_nobody(sent: Any) -> None:  # noqa: ANN401
    assert verifier(SECRET).tenant_of({"spm_tenant": sent}) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda proof: proof.upper(),
        lambda proof: proof + "\n",
        lambda proof: proof[:-1],
        lambda proof: proof + "0",
        lambda proof: proof[:-1] + "\u0660",
        lambda proof: "",
        lambda proof: proof.encode(),
        lambda proof: [proof],
    ],
)
def test_a_proof_that_is_not_exact_is_none(change: Any) -> None:  # noqa: ANN401
    proof = tenant_proof(SECRET, A)
    one = verifier(SECRET)
    assert one.tenant_of(claim(A, change(proof))) is None
    assert one.tenant_of({"spm_tenant": {"id": A}}) is None
    assert one.tenant_of({"spm_tenant": {"proof": proof}}) is None
    assert one.tenant_of({}) is None


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é", "a\n"])
def test_a_proven_name_that_is_no_tenant_is_nobody(name: str) -> None:
    proof = tenant_proof(SECRET, TenantId(name))
    assert verifier(SECRET).tenant_of(claim(name, proof)) is None


@pytest.mark.parametrize("bad", [b"", bytes(31), bytes(33), "x" * 32, None, bytearray(32), 32])
def test_secrets_refused(bad: Any) -> None:  # noqa: ANN401
    assert TenantVerifier().add_secret(bad) is False


def test_only_the_newest_secrets_are_believed() -> None:
    one = TenantVerifier()
    sent = [claim(A, tenant_proof(numbered(n), A)) for n in range(MAX_SECRETS + 1)]
    for number in range(MAX_SECRETS):
        one.add_secret(numbered(number))
    assert all(one.tenant_of(each) == A for each in sent[:MAX_SECRETS])
    one.add_secret(numbered(MAX_SECRETS))
    assert [one.tenant_of(each) for each in sent] == [None] + [A] * MAX_SECRETS


def test_a_secret_added_again_takes_no_place_and_becomes_the_newest() -> None:
    one = TenantVerifier()
    for number in range(MAX_SECRETS):
        one.add_secret(numbered(number))
    assert one.add_secret(numbered(0))
    assert one.tenant_of(claim(A, tenant_proof(numbered(1), A))) == A
    one.add_secret(numbered(MAX_SECRETS))
    assert one.tenant_of(claim(A, tenant_proof(numbered(0), A))) == A
    assert one.tenant_of(claim(A, tenant_proof(numbered(1), A))) is None


def test_a_proof_is_computed_once_and_remembered_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = verifier(SECRET)
    names = [TenantId(f"t{number}") for number in range(MAX_PROOFS + 1)]
    sent = [claim(name, tenant_proof(SECRET, name)) for name in names]
    computed: list[TenantId] = []

    def counted(secret: bytes, tenant: TenantId) -> str:
        computed.append(tenant)
        return tenant_proof(secret, tenant)

    monkeypatch.setattr(tenancy, "tenant_proof", counted)
    for each in sent:
        one.tenant_of(each)
    assert computed == names
    for each in sent[1:]:  # still remembered; the oldest had to go
        one.tenant_of(each)
    assert computed == names
    assert one.tenant_of(sent[0]) == names[0]
    assert computed == [*names, names[0]]


def test_wrong_proofs_push_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = verifier(SECRET)
    good = claim(A, tenant_proof(SECRET, A))
    one.tenant_of(good)
    for number in range(MAX_PROOFS + 1):
        one.tenant_of(claim(A, f"{number:064x}"))

    def refused(secret: bytes, tenant: TenantId) -> str:
        raise AssertionError("computed again")

    monkeypatch.setattr(tenancy, "tenant_proof", refused)
    assert one.tenant_of(good) == A


@pytest.mark.parametrize("good", ["a", "default", "key-0123", "A.b_c-9", "x" * 64])
def test_tenants_accepted(good: str) -> None:
    assert parse_tenant(good) == good


@pytest.mark.parametrize("bad", ["", " ", "a b", "a\n", "a/b", "é", "x" * 65, None, 1, b"a", ["a"]])
def test_tenants_refused(bad: object) -> None:
    assert parse_tenant(bad) is None
