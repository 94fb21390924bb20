"""Real servers for benchmarks and tests: each a program that is installed, on a free port of this machine.

A module starts its program, and puts objects through the server's own interface, without fst.
"""
