from safetensors import safe_open


def enable_tqdm(use_tqdm_on_load):
    return use_tqdm_on_load


def safetensors_weights_iterator(files, use_tqdm_on_load, strategy=None, local_expert_ids=None, **prefetching):
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield f"{strategy}.{name}", opened.get_tensor(name)
