"""HTTP below the API: servers and their limits, bodies, credentials, tenants, error answers."""
