"""LoRA adapters in PEFT's format: `peft_config.py` reads the settings, `peft_folder.py` the folder and its tensors.

These modules import no torch. Both ways of computing use them: models/on_library/adapters.py, models/torch_adapters.py.
"""
