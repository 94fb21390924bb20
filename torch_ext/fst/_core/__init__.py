"""Bindings of libfst.so: operators and classes with Python types and exceptions, and what PyTorch's compilers need."""
