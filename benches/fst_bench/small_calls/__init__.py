"""CPU time of small calls, beside safetensors."""
