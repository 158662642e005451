"""The one error of the codec: a request that cannot be encoded, with what a server needs to answer it."""

from __future__ import annotations

import json
from typing import Any

from deepinfer.api.errors import InvalidRequest

__all__ = ["CodecError"]


class CodecError(InvalidRequest):
    """A request (or a token stream) that the codec refuses; other requests are unaffected.

    Attributes: `status` (HTTP status, 400 unless said otherwise), `protocol` ("text", "chat", "responses" or
    "messages"), `message`, `param` (the offending parameter, or None), `code` (a short machine-readable name).
    """

    def __init__(
        self, status: int, protocol: str, message: str, param: str | None = None, *, code: str = "invalid_request_error"
    ) -> None:
        super().__init__(message, field=param)
        self.status = status
        self.protocol = protocol
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.status, self.protocol, self.message, self.param, self.code))

    def body(self) -> dict[str, Any]:
        """The error body in the envelope of the request's protocol (Messages has its own, the others share one)."""
        if self.protocol == "messages":
            kind = "invalid_request_error" if self.status < 500 else "api_error"
            message = self.message if self.param is None else f"{self.param}: {self.message}"
            return {"type": "error", "error": {"type": kind, "message": message}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body_json(self) -> str:
        """`body()` as compact JSON text."""
        return json.dumps(self.body(), ensure_ascii=False, separators=(",", ":"))


def _rebuild(status: int, protocol: str, message: str, param: str | None, code: str) -> CodecError:
    return CodecError(status, protocol, message, param, code=code)
