"""Loads of models, and by groups of ranks, that are larger than this machine: the real planner on the real shapes, and
a clock made of given rates.
"""
