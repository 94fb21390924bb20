"""Typed bindings of libfst.so, and code that all rooms share: arguments, dtypes, exceptions and process groups."""
