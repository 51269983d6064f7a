"""TLS between gateways and cores: sessions, streams, certificate files."""
