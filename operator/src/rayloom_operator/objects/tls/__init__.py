"""Certificates for TLS between gateway pods and engines."""
