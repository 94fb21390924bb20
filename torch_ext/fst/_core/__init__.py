"""The operators and classes of libfst.so, with Python types, errors and fake implementations."""
