"""Several models behind one API port: the field `model` of a request names the model that answers.

models_document  parses and checks the document in `models_file`
models_file      reads the file, and reads it again when it changes
model_names      finds the model for a name, and checks that the API key may use the name
target_choice    chooses the target of an alias for a request (pure)
model_field      reads `model` and the user from a body
key_ring         finds the names that an API key may use
running_model    one model: its service, its engines, the key of its engines
held_requests    requests that wait until a model has its first tokenizer
running_models   all models, changed when the document changes
endpoints        the handlers of the API port
documents        lists and status documents of all models
process          the process
"""
