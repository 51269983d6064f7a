"""The API server process ("front"): receives HTTP requests, sends sequences to the core, streams text.

app         the API port's application, behind gate (keys, request ids, drains)
routes      the table of all endpoints of the API port
document/   the OpenAPI document: answer models, statuses, the page /docs
openai/     OpenAI's endpoints: wire formats, prompts, answers, streams
generation/ one HTTP request's sequences, from admission to the last delta
operations/ lifecycle, metrics, health and the admin port
core_link/  the connection to the EngineCore; after the core's death it reconnects and submits the unfinished
            sequences again
http/       connections, bodies, keys and errors, for any API
"""
