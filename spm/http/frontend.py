"""What one API server knows once it has started, kept in the application's state."""

import logging
import secrets
from dataclasses import dataclass
from typing import Any

from spm.config import SamConfig
from spm.hints import DEFAULT_TENANT
from spm.http.engine import MAX_UNANSWERED, EngineOperations
from spm.http.errors import RequestError
from spm.http.settings import NO_CONNECTOR, sam_settings
from spm.http.tenants import RequestTenants
from spm.tenancy import SECRET_BYTES

_ATTRIBUTE = "spm_frontend"
_REGISTRATION_DEADLINE_S = 60.0
"""Longer than for a client: other API servers may already keep the engine busy."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Frontend:
    """Session operations are available."""

    sam: SamConfig
    engine: EngineOperations
    tenants: RequestTenants


@dataclass(frozen=True, slots=True)
class Unavailable:
    """They are not; ``reason`` says what to set."""

    reason: str


def frontend_of(app: Any) -> Frontend | Unavailable:  # noqa: ANN401
    """What :func:`store` kept for the application ``app``; it may be None."""
    found = getattr(getattr(app, "state", None), _ATTRIBUTE, None)
    return found if isinstance(found, (Frontend, Unavailable)) else Unavailable(NO_CONNECTOR)


def store(frontend: Frontend | Unavailable, state: Any) -> None:  # noqa: ANN401
    """Keep ``frontend`` in ``app.state``, before the first request."""
    setattr(state, _ATTRIBUTE, frontend)


async def start(engine_client: Any) -> Frontend | Unavailable:  # noqa: ANN401
    """Read the settings and, if there are tenants, make this server known to the engines.

    ``engine_client`` is vLLM's, or None on a server without an engine. Raises
    :class:`spm.errors.ConfigError` for settings the engine cannot have started with.
    """
    if engine_client is None:
        return Unavailable(NO_CONNECTOR)
    sam = sam_settings(engine_client.vllm_config.kv_transfer_config)
    if isinstance(sam, str):
        return Unavailable(sam)
    engine = EngineOperations(
        engine_client.engine_core, max_of_tenant=sam.tenant_part(MAX_UNANSWERED)
    )
    secret = await _register(engine) if sam.tells_tenants else None
    return Frontend(sam, engine, RequestTenants(sam, secret))


async def _register(engine: EngineOperations) -> bytes | None:
    """A secret that every engine knows this server by, or None."""
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        answers = await engine.ask(
            "register_frontend", DEFAULT_TENANT, deadline_s=_REGISTRATION_DEADLINE_S, secret=secret
        )
        problems = [str(a.get("detail", a["status"])) for a in answers if a["status"] != "ok"]
    except RequestError as error:
        problems = [error.message]
    if problems:
        logger.error(
            "no tenant but the default one can be served, every other request gets a 503: %s",
            problems[0],
        )
        return None
    return secret
