"""Errors in the shape of OpenAI's API: `{"error": {"message": …, "type": …, "param": …, "code": …}}`."""

from collections.abc import Mapping

import msgspec


class ApiError(Exception):
    """Ends a request with an HTTP status. The message goes to the client: it names no path and no secret."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """`type` of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong: sent again, it would fail again."""
    return ApiError(400, message, param=param, code=code)


def unauthorised() -> ApiError:
    message = "Incorrect API key provided. Send the server's key in the header 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def unknown_model(asked: str, served: str) -> ApiError:
    message = f"The model `{asked[:100]}` does not exist. This server has `{served}`."
    return ApiError(404, message, param="model", code="model_not_found")


def too_long(tokens: int, max_tokens: int | None, context: int) -> ApiError:
    """The prompt, or what the request wants after it, does not fit into the context."""
    wanted = f", and {max_tokens} more for the answer" if max_tokens is not None else ""
    message = (
        f"This model's maximum context length is {context} tokens. However, your prompt has {tokens}{wanted}. "
        "Shorten it, or reduce max_tokens."
    )
    return invalid(message, code="context_length_exceeded")


def busy(retry_after_s: int) -> ApiError:
    message = f"The server has as many requests as it takes. Try again in {retry_after_s} s."
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(retry_after_s)})


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="service_unavailable")
