"""Patches third-party code to load and save through fst."""
