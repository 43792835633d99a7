"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} and a status."""

import math

from common.errors import GalleyError


def error_body(error: GalleyError) -> dict[str, object]:
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: GalleyError) -> dict[str, str]:
    """Retry-After in whole seconds, where it is known when to come back."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
