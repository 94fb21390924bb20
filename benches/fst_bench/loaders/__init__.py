"""Loaders: one module for each library, with one class for each way to use the library."""
