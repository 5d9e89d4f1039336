"""Monitoring in production: Prometheus metrics, and OpenTelemetry spans in `spans`."""

from .metrics import Monitor

__all__ = ["Monitor"]
