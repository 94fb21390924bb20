"""Loads into the parameters and buffers of a module."""
