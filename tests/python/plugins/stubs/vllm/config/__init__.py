class VllmConfig:
    pass
