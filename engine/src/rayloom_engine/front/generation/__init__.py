"""The sequences of one HTTP request, from admission to the last delta. No module here depends on the request's API."""
