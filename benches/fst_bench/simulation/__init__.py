"""Simulated loads of models and by groups too large for this machine: the real planner on real shapes, with a clock of
given rates.
"""
