"""Profiles of loads and saves."""
