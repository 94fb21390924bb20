"""Names of tensorizer's hash verification, which safetensors files do not support."""


class HashMismatchError(Exception):
    """Mismatch between the bytes of a tensor and their hash. fst never raises it."""


def refuse_hashes(verify_hash: bool | None) -> None:
    """Raises NotImplementedError if verification is requested."""
    if verify_hash:
        raise NotImplementedError(
            "safetensors files hold no hashes to verify: leave verify_hash out (headers and lengths are always "
            "checked), and compare a module with its file by verify_module"
        )
