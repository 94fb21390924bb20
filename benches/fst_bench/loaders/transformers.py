"""Model of transformers, whose weights are loaded by the library in use.

The import takes seconds. Only measurements that need it import it, before the clock starts.
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


def pretrained_state(folder: str, device: str) -> dict[str, Tensor]:
    """Returns the tensors of the model after `from_pretrained`."""
    # A device map requires accelerate; a model on the CPU needs no device map.
    placed = None if device == "cpu" else {"": device}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True, device_map=placed)
    state: dict[str, Tensor] = model.state_dict()
    return state
