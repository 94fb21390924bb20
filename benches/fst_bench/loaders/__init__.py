"""How each library loads: one module each, with one class for each way to use it."""
