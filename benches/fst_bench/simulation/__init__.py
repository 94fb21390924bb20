"""Simulated loads of large models by large groups: fst's planner on real shapes, and a clock with given rates."""
