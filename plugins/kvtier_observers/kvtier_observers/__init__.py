"""Observers of a stack: lines of JSON, metrics for Prometheus, traces for OpenTelemetry."""
