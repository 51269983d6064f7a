"""LoRA adapters in PEFT's format: `peft_config.py` reads the settings, `peft_folder.py` the folder and its tensors.

No torch. The two parts that compute import this: models/on_library/adapters.py and models/torch_adapters.py.
"""
