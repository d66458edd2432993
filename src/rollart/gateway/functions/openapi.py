"""OpenAPI document of a served reward function, made from the types of the wire format."""

from typing import Any

import msgspec

from rollart.gateway.functions.answers import JSON
from rollart.gateway.functions.requests import MAX_CALLS, MAX_DEADLINE_S, MAX_KEY_CHARACTERS, SIGNATURE
from rollart.ports.reward import RewardKind
from rollart.types.reward_wire import FunctionRequest, FunctionResponse

BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_ERRORS = {
    "401": "The secret is missing or wrong.",
    "403": "The deployment has no secret yet.",
    "405": "Another method.",
    "408": "The body did not arrive in time.",
    "413": "The request, or its answer, is too large.",
    "422": "The body is not a request for this function.",
    "429": "As many calls run as may; `Retry-After` says when to try again.",
    "504": "The deadline passed before any call was finished.",
}


class Problem(msgspec.Struct):
    code: str
    message: str


class ErrorBody(msgspec.Struct):
    error: Problem


class Health(msgspec.Struct):
    status: str


class Document(msgspec.Struct):
    openapi: str


def document(function: str, kind: RewardKind, version: str, *, secret: bool) -> bytes:
    """The document of `function`; `secret`: whether clients need one."""
    _, components = msgspec.json.schema_components(
        (FunctionRequest, FunctionResponse, ErrorBody, Health, Document), ref_template="#/components/schemas/{name}"
    )
    _state_limits(components, kind)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "signature": {"type": "apiKey", "in": "header", "name": SIGNATURE},
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": f"Reward function {function}", "version": version},
            "paths": {
                "/": {"post": _score(kind)},
                "/health": {"get": _get("health", "Whether the function can take calls.", "Health", ("503",))},
                "/openapi.json": {"get": _get("openapi", "This document.", "Document", ())},
            },
            "components": {"schemas": components, **({"securitySchemes": schemes} if secret else {})},
            **({"security": [{"bearer": []}, {"signature": []}]} if secret else {}),
        }
    )


def _state_limits(components: dict[str, Any], kind: RewardKind) -> None:
    """Add what `requests.parse` checks and the types do not say."""
    request = components["FunctionRequest"]["properties"]
    request["calls"] |= {"minItems": 1, "maxItems": MAX_CALLS}
    request["deadline_s"] |= {"exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S}
    call = components["FunctionCall"]["properties"]
    call["key"] |= {"minLength": 1, "maxLength": MAX_KEY_CHARACTERS}
    call["transcripts"] |= {"minItems": 1} | ({"maxItems": 1} if kind is RewardKind.TRAJECTORY else {})
    components["Transcript"]["properties"]["artifact"]["pattern"] = BASE64


def _score(kind: RewardKind) -> dict[str, Any]:
    return {
        "operationId": "score",
        "summary": f"Compute rewards; a call has {kind.value}.",
        "requestBody": {"required": True, "content": _content("FunctionRequest")},
        "responses": {
            "200": {"description": "An answer per call, in the same order.", "content": _content("FunctionResponse")}
        }
        | {status: {"description": text, "content": _content("ErrorBody")} for status, text in _ERRORS.items()},
    }


def _get(name: str, summary: str, schema: str, also: tuple[str, ...]) -> dict[str, Any]:
    bodies = dict.fromkeys(("200", *also), schema) | {"405": "ErrorBody"}
    return {
        "operationId": name,
        "summary": summary,
        "security": [],
        "responses": {status: {"description": summary, "content": _content(body)} for status, body in bodies.items()},
    }


def _content(schema: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
