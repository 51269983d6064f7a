"""HTTP for any API: servers and their limits, bodies, credentials, tenants, error answers."""
