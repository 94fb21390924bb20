class VllmConfig:
    pass


class ModelConfig:
    quantization = None

    def __init__(self, model):
        self.model = model
