"""LoRA adapters in PEFT's format: `peft_config.py` reads the settings, `peft_folder.py` the folder and its tensors.

These modules import no torch. models/on_library/adapters.py and models/torch_adapters.py compute adapters with them.
"""
