class ModelConfig:
    quantization = None

    def _is_already_quantized(self):
        return False
