class WeightUpdater:
    def __init__(self, model_config, get_model, update_model_fields):
        self.model_config = model_config
        self.get_model = get_model
        self.update_model_fields = update_model_fields

    def update_weights_from_disk(self, model_path, load_format, weight_name_filter=None, recapture_cuda_graph=False):
        return True, f"loaded {load_format}"
