"""The sequences of one HTTP request, from admission to the last delta. Independent of the API that received it."""
