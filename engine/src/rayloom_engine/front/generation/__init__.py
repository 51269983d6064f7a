"""One HTTP request's sequences, from admission to the last delta, whatever API its answer is written for."""
