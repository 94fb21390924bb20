"""Requests to verify data: digests, manifests and signatures."""
