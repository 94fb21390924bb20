"""Saves to one file or several."""
