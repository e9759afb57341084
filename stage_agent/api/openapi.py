"""``/openapi.json``, made from the table of operations and the command models."""

import re
from typing import Any

from pydantic.json_schema import models_json_schema

from stage_agent.api.gate import OPEN_PATHS
from stage_agent.api.operations import READS, WRITES, Operation

_REFERENCE = "#/components/schemas/{model}"
_PROBLEM = {
    "type": "object",
    "description": "RFC 9457 problem document",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "one sentence: what is wrong and what to do"},
        "instance": {"type": "string"},
        "code": {"type": "string", "description": "stable snake_case"},
        "details": {"type": "object"},
    },
}


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of everything that the API can do."""
    models = [operation.command for operation in WRITES if operation.command is not None]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for operation in (*READS, *WRITES):
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "stagemesh node", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Problem": _PROBLEM},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "security": [] if operation.path in OPEN_PATHS else [{"token": []}, {}],
        "responses": {
            str(operation.success): {"description": "done", "content": {operation.media_type: {}}},
            "default": {
                "description": "refused",
                "content": {"application/problem+json": {"schema": {"$ref": _REFERENCE.format(model="Problem")}}},
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ] + [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in operation.query
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.command is not None:
        schema = {"$ref": _REFERENCE.format(model=operation.command.__name__)}
        described["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return described
