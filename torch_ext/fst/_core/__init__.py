"""Typed bindings of libfst.so, and the bases of all rooms: arguments, dtypes, exceptions and process groups."""
