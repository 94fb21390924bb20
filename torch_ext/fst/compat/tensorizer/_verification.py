"""What stands for the checking of hashes, which a safetensors file has none of."""


class HashMismatchError(Exception):
    """The bytes of a tensor are not those that were written. Nothing raises it yet."""


def refuse_hashes(verify_hash: bool | None) -> None:
    """Whoever asks for a check is told that there is none."""
    if verify_hash:
        raise NotImplementedError(
            "safetensors files hold no hashes to verify: leave verify_hash out (headers and lengths are always "
            "checked), and compare a module with its file by verify_module"
        )
