"""Model of transformers, whose weights are loaded by the library in use.

The import takes seconds. Only measurements that need it import it, before the clock starts.
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from .base import Job, Tensors


def pretrained_state(job: Job) -> Tensors:
    """Returns the tensors of the model after `from_pretrained`."""
    # A device map requires accelerate; a model on the CPU needs no device map.
    placed, folder = None if job.device == "cpu" else {"": job.device}, Path(job.paths[0]).parent
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True, device_map=placed)
    state: Tensors = model.state_dict()
    return state
