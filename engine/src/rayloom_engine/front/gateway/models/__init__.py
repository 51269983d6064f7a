"""Several models behind one API port: the field `model` of a request names the one that answers.

models_document  the document of `models_file`, checked
models_file      that document, read again when the file changes
model_names      which names there are, and what each leads to
target_choice    which target of an alias gets a request (pure)
model_field      the fields of a body that decide where it goes
key_ring         which API keys may use which names
running_model    one model: its service, its engines, its keys
running_models   all of them, and how a new document changes them
endpoints        the handlers of the API port
documents        lists and status documents of all models
process          the process
"""
