"""Names of dtypes: those of PyTorch, of headers, and short ones. Needs no PyTorch."""

# Names in headers by PyTorch's, in the order in which tensors are stored in a new file. Wide dtypes come first, so that
# all tensors are aligned.
HEADER_NAMES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}

# Stored dtypes that loads and `scatter` cast if they are given a `dtype`.
CASTABLE = ("float16", "bfloat16", "float32", "float64")

# Other names, which PyTorch and programs for quantization use.
_ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp64": "float64",
}
_ALIASES |= {header: name for name, header in HEADER_NAMES.items()}


def full_name(text: str) -> str:
    """Returns PyTorch's name of a dtype that has this short name or name in headers; other text as it is."""
    name = text.removeprefix("torch.")
    return _ALIASES.get(name, name)
