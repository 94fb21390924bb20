def initialize_layerwise_reload(model):
    model.reloading = True


def finalize_layerwise_reload(model, model_config):
    model.reloading = False
