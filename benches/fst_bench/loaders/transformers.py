"""A model of transformers, whose weights whatever library is in charge loads.

Importing it takes seconds, so only who measures it does, before the clock starts.
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


def pretrained_state(folder: str, device: str) -> dict[str, Tensor]:
    """The tensors of the model after `from_pretrained`."""
    # accelerate is needed for a device map, and a model on the CPU needs none.
    placed = None if device == "cpu" else {"": device}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True, device_map=placed)
    state: dict[str, Tensor] = model.state_dict()
    return state
