"""What a client is told when its request cannot be answered, in vLLM's own error shape."""

from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from spm.errors import SpmError

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "UnsupportedMediaTypeError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "GatewayTimeoutError",
}
_FINAL = {"x-should-retry": "false"}
"""The `openai` client repeats every 5xx unless told that it is of no use."""


class RequestError(SpmError):
    """A request ends here with ``code``; ``param`` is the field at fault, if one is.

    ``status`` is the outcome word of the management routes; answers on the endpoints that
    vLLM serves itself have none, so that they look like vLLM's. ``result`` is what the
    engines said, where there is more to it than one sentence.
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        param: str | None = None,
        status: str | None = None,
        result: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = HTTPStatus(code)
        self.message = message
        self.param = param
        self.status = status
        self.result = result

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES[self.code],
            "param": self.param,
            "code": self.code.value,
        }
        if self.status is not None:
            error["status"] = self.status
        body: dict[str, Any] = {"error": error}
        if self.result is not None:
            body["result"] = self.result
        headers = _FINAL if self.code is HTTPStatus.NOT_IMPLEMENTED else None
        return JSONResponse(body, self.code.value, headers)
