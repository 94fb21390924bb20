"""Typed bindings of the operators, and code that all rooms share: arguments, dtypes, exceptions and process groups."""
