from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

LOADERS = {"auto": DefaultModelLoader}


def register_model_loader(load_format):
    def register(loader):
        assert issubclass(loader, DefaultModelLoader)
        assert load_format not in LOADERS, "registered twice"
        LOADERS[load_format] = loader
        return loader

    return register


def get_model_loader(load_config):
    return LOADERS[load_config.load_format](load_config)
