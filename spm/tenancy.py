"""Which tenant a request belongs to, as an API server of ours says it and the engine believes it.

Clients may put anything into ``kv_transfer_params``, a tenant too. Each API server therefore
makes a secret, registers it with the engine out of the clients' reach, and sends a proof made
with it next to the tenant's name. What is not proven is not believed.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Any

from tracker.ids import TenantId

SECRET_BYTES = 32
MAX_SECRETS = 64
"""More API servers than one engine has; those that were restarted stay behind for a while."""
MAX_PROOFS = 1024

_SALT_DOMAIN = b"spm.salt.1"
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PROOF = re.compile(r"[0-9a-f]{64}")
_PERSON = b"spm.tenant.1"
"""Keeps these proofs apart from any other use of the same secret."""


def parse_tenant(raw: object) -> TenantId | None:
    """``raw`` as a tenant id (1 to 64 letters, digits, '_', '.' or '-'), else None."""
    if isinstance(raw, str) and _TENANT.fullmatch(raw):
        return TenantId(raw)
    return None


def tenant_proof(secret: bytes, tenant: TenantId) -> str:
    """What only a holder of ``secret`` can say about ``tenant``: 64 hex digits. Any thread."""
    return hashlib.blake2b(tenant.encode(), digest_size=32, key=secret, person=_PERSON).hexdigest()


def tenant_salt(tenant: TenantId, own: str | None) -> str:
    """The ``cache_salt`` of a tenant's request that came with the salt ``own``: no two tenants
    share one, however they choose. 64 hex digits, the same on every server. Any thread."""
    said = [
        _SALT_DOMAIN,
        tenant.encode(),
        b"" if own is None else b"\0" + own.encode("utf-8", "surrogatepass"),
    ]
    return hashlib.sha256(b"\0".join(said)).hexdigest()


class TenantVerifier:
    """The engine's side: believes proofs made with a registered secret.

    Used on the scheduler's thread only.
    """

    def __init__(self) -> None:
        self._secrets: dict[bytes, None] = {}  # oldest first
        self._proven: dict[tuple[str, str], TenantId] = {}  # oldest first

    def add_secret(self, secret: bytes) -> bool:
        """Believe proofs made with ``secret`` from now on; False if it is no secret of ours.

        The newest :data:`MAX_SECRETS` are kept; adding one again only makes it the newest.
        """
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            return False
        self._secrets.pop(secret, None)
        self._secrets[secret] = None
        if len(self._secrets) > MAX_SECRETS:
            del self._secrets[next(iter(self._secrets))]
            self._proven.clear()  # some may have been proven with the secret just forgotten
        return True

    def tenant_of(self, kv_transfer_params: Mapping[str, Any]) -> TenantId | None:
        """The tenant in ``spm_tenant``; None when there is none or its proof does not verify."""
        claim = kv_transfer_params.get("spm_tenant")
        if not isinstance(claim, Mapping):
            return None
        name, proof = claim.get("id"), claim.get("proof")
        if not isinstance(name, str) or not isinstance(proof, str):
            return None
        return self._proven.get((name, proof)) or self._verified(name, proof)

    def _verified(self, name: str, proof: str) -> TenantId | None:
        """The slow path. Only what verifies is remembered, so that nobody else can fill the
        memory."""
        tenant = parse_tenant(name)
        if tenant is None or not _PROOF.fullmatch(proof):
            return None
        for secret in self._secrets:
            if hmac.compare_digest(tenant_proof(secret, tenant), proof):
                if len(self._proven) >= MAX_PROOFS:
                    del self._proven[next(iter(self._proven))]
                self._proven[tenant, proof] = tenant
                return tenant
        return None
