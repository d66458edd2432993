"""Events of AWS Lambda: function URLs (payload format 2.0) and direct invocations, as requests and back.

A function URL sends an HTTP request as an object: header names in lower case, a body that may be base64. A direct
invocation sends the JSON of a `FunctionRequest` itself and gets that of a `FunctionResponse`, or of an error with its
`status`; IAM authenticates it, so it needs no secret.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollart.gateway.functions.answers import HttpAnswer, malformed

Event = Mapping[str, Any]


class LambdaRequest(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def is_http(event: Any) -> bool:
    """Whether an event comes from a function URL (or an HTTP API of API Gateway, which has the same form)."""
    context = event.get("requestContext") if isinstance(event, Mapping) else None
    return isinstance(context, Mapping) and "http" in context


def http_request(event: Event) -> LambdaRequest:
    """The request in an event of a function URL."""
    body = event.get("body") or ""
    if event.get("isBase64Encoded"):
        try:
            decoded = base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise malformed(f"The body is not base64: {error}.") from error
    else:
        decoded = body.encode()
    headers = {str(name).lower(): str(value) for name, value in (event.get("headers") or {}).items()}
    return LambdaRequest(event["requestContext"]["http"]["method"], event.get("rawPath") or "/", headers, decoded)


def http_response(answer: HttpAnswer) -> dict[str, Any]:
    return {
        "statusCode": answer.status,
        "headers": answer.headers,
        "body": answer.body.decode(),
        "isBase64Encoded": False,
    }


def invoke_body(event: Any) -> bytes:
    """The body of a direct invocation."""
    return json.dumps(event).encode()


def invoke_result(answer: HttpAnswer) -> dict[str, Any]:
    """The result of a direct invocation.

    >>> invoke_result(HttpAnswer(429, b'{"error": {"code": "busy", "message": "Later."}}'))
    {'status': 429, 'error': {'code': 'busy', 'message': 'Later.'}}
    """
    result: dict[str, Any] = json.loads(answer.body)
    return result if answer.status == 200 else {"status": answer.status, **result}
