"""Monitoring in production: Prometheus metrics, and OpenTelemetry spans in `spans`."""

from ...extras import named

try:
    from .metrics import Monitor
except ModuleNotFoundError as error:
    raise named(error, __name__) from error

__all__ = ["Monitor"]
