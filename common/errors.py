"""The error tree: every failure that crosses a boundary of Galley is one of these.

Each class states the HTTP status and the OpenAI error type and code a client would see, and whether
another attempt on another instance may succeed (`retryable`). Messages say what to do about it.
Knows nothing of HTTP frameworks, NATS or the engine.
"""

from typing import ClassVar


class GalleyError(Exception):
    """Base of all errors that Galley raises on purpose."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


# --- what a client did wrong ---------------------------------------------------------------------


class InvalidRequest(GalleyError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(InvalidRequest):
    status = 401
    code = "invalid_api_key"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class Overloaded(GalleyError):
    """Admission refused: come back after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


# --- what the cluster cannot do now --------------------------------------------------------------


class NoInstance(GalleyError):
    """Nobody serves this role at the moment."""

    status = 503
    type = "service_unavailable_error"
    code = "no_instance"


class DeadlineExceeded(GalleyError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(GalleyError):
    """The client, the gateway or an operator ended the request."""

    status = 499
    code = "cancelled"


class WorkerFailed(GalleyError):
    """A worker gave the request up; the gateway may start another attempt."""

    status = 502
    code = "worker_failed"
    retryable = True


class AttemptsExhausted(GalleyError):
    status = 502
    code = "attempts_exhausted"


# --- control plane -------------------------------------------------------------------------------


class ControlError(GalleyError):
    """The message bus did not do what was asked."""

    status = 503
    type = "service_unavailable_error"
    code = "control_plane"
    retryable = True


class NoResponders(ControlError):
    """Nobody listens on the subject: the process behind it is gone."""


class ControlTimeout(ControlError):
    """No answer within the time given."""


class ControlDisconnected(ControlError):
    """The bus is not connected at the moment; it reconnects for ever."""


class PayloadTooLarge(ControlError):
    """One message is over the server's max_payload and may not travel in parts."""

    retryable = False


class MessageInvalid(GalleyError):
    """Bytes that are not a message of the kind expected here."""

    code = "message_invalid"


# --- KV transfer ---------------------------------------------------------------------------------


class KVTransferError(GalleyError):
    """The KV cache of a request did not arrive; recompute or try another instance."""

    status = 502
    code = "kv_transfer_failed"
    retryable = True


class KVPeerLost(KVTransferError):
    """The endpoint to the peer broke: its process died or the path is cut."""


class KVTimeout(KVTransferError):
    """The peer was silent for longer than kv_timeout_s."""


class KVUnknownLease(KVTransferError):
    """The exporter does not know the lease (any more)."""


class KVRevoked(KVTransferError):
    """The lease was taken back: rebound to another reader, aborted, or past its deadline."""


class KVMismatch(KVTransferError):
    """Layout or weights of the two sides differ; these two instances must not be paired."""


class KVPoolUnavailable(GalleyError):
    """The shared KV pool cannot be reached or does not answer in time: go on without it and recompute."""

    status = 503
    retryable = True


# --- engine and set-up ---------------------------------------------------------------------------


class PoolExhausted(GalleyError):
    """Not enough free blocks; queue the work or free something first."""

    status = 503
    code = "kv_pool_exhausted"
    retryable = True


class StepFailed(WorkerFailed):
    """The model raised during a step; the sequences of that step are lost, the worker lives."""

    code = "step_failed"


class ConfigError(GalleyError):
    """A setting is unknown or impossible; the message names the key and what is allowed."""

    code = "config"


class UnsupportedModel(ConfigError):
    """The checkpoint's architecture cannot be served with paged per-head KV."""

    code = "unsupported_model"
