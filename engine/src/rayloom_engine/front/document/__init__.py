"""The OpenAPI document of the API port: answer models, statuses, and the functions that write them down."""
