"""Which tenant an HTTP request belongs to, and how the engine comes to believe it."""

import hashlib

from starlette.datastructures import Headers

from spm.config import SamConfig
from spm.hints import DEFAULT_TENANT
from spm.http.errors import RequestError
from spm.tenancy import parse_tenant, tenant_proof
from tracker.ids import TenantId


class RequestTenants:
    """Reads the tenant off a request's headers and states it for the engine. Any thread.

    ``secret`` is what the engines know this API server by, None if they do not: tenants then
    cannot be proven, and a request that needs one is refused rather than run as another.
    """

    def __init__(self, sam: SamConfig, secret: bytes | None) -> None:
        self._sam = sam
        self._secret = secret

    def tenant_of(self, headers: Headers) -> TenantId:
        """The request's tenant; :class:`RequestError` 400 for a bad name, 503 if unprovable."""
        tenant = self._named(headers)
        if tenant != DEFAULT_TENANT and self._secret is None:
            raise RequestError(
                503,
                "this server could not register with the engine when it started, so only the "
                "default tenant is served: restart it",
                status="failed",
            )
        return tenant

    def claim(self, tenant: TenantId) -> dict[str, str] | None:
        """``spm_tenant`` of a request that goes to the engine; None for the default tenant."""
        if tenant == DEFAULT_TENANT or self._secret is None:
            return None
        return {"id": tenant, "proof": tenant_proof(self._secret, tenant)}

    def _named(self, headers: Headers) -> TenantId:
        if self._sam.tenant_header:
            given = headers.getlist(self._sam.tenant_header)
            if given:
                # A second one can only have been slipped past the gateway by the client.
                tenant = parse_tenant(given[0]) if len(given) == 1 else None
                if tenant is None:
                    raise RequestError(
                        400,
                        f"header {self._sam.tenant_header}: one value of 1 to 64 letters, digits, "
                        "'_', '.' or '-' is needed",
                        param=self._sam.tenant_header,
                    )
                return tenant
        if self._sam.tenant_from_api_key:
            token = _bearer(headers)
            if token:
                digest = hashlib.sha256(token.encode()).hexdigest()
                return TenantId("key-" + digest[:16])
        return DEFAULT_TENANT


def _bearer(headers: Headers) -> str:
    """The API key, read as vLLM's own check reads it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""
