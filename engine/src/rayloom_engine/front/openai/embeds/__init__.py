"""Prompts of embeddings, from the field `prompt_embeds` to an EmbeddedPrompt.

Clients save a tensor with torch.save, which writes a pickle in a zip archive. The front has no torch, and a pickle
could run any code. So these modules read the archive themselves: `archive.py` its members, `tensor_pickle.py` the
pickle, whose instructions are interpreted and call nothing, `saved_tensor.py` the rows, `field.py` the field.
"""
