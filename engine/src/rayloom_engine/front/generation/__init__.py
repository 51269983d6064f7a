"""The sequences of an HTTP request, from admission to the last delta, for every API."""
