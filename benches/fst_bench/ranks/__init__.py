"""Loads that several processes of one machine do together, side by side with what the peers have for that."""
