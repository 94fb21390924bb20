"""Servers for the tests, and their certificates."""
