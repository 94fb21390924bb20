"""Real servers for the tests: each a program that is installed, on a free port of this machine.

A test that needs a program that is not installed is skipped. A module starts its program and puts objects through the
server's own interface, without fst.
"""
