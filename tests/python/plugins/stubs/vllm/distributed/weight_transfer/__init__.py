from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

__all__ = ["WeightTransferEngine", "WeightTransferEngineFactory"]
