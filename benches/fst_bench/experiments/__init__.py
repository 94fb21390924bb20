"""Experiments on a GPU that is rented for minutes, which decide how loads read, copy, pin, allocate and wait."""
