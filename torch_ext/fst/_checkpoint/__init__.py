"""Open checkpoints: names, headers, slices and tensors read on request."""
