"""Safetensors checkpoints for `torch.distributed.checkpoint`.

    import torch.distributed.checkpoint as dcp

    import fst.dcp

    dcp.save(state_dict, storage_writer=fst.dcp.StorageWriter("model"))
    dcp.load(state_dict, storage_reader=fst.dcp.StorageReader("model"))

State dicts may hold plain tensors and DTensors, as `get_model_state_dict` returns them. Any planner may be used.
Each byte is read and written once for all ranks, and a rank keeps only the bytes that its part of the state dict needs.
"""

from fst.dcp.reader import StorageReader
from fst.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
