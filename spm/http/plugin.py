"""vLLM endpoint plugin: session operations on the OpenAI-compatible server.

vLLM loads it only when ``VLLM_PLUGINS`` names it.
"""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

from spm.http import frontend, routes
from spm.http.errors import RequestError
from spm.http.middleware import AgentHintMiddleware


class SessionEndpointPlugin:
    """The object that vLLM's ``vllm.endpoint_plugins`` contract asks for."""

    name = "spm"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add routes and middleware, before the server starts.

        vLLM adds its own middleware later, so its API key check and CORS lie around ours.
        """
        app.include_router(routes.router)
        app.add_exception_handler(RequestError, routes.request_error)
        app.add_middleware(AgentHintMiddleware)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:  # noqa: ANN401
        """Read the settings and make this server known to the engines, before it serves.

        Raises :class:`spm.errors.ConfigError` for settings the engine cannot have started with.
        """
        frontend.store(await frontend.start(engine_client), state)
