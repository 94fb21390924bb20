"""Plans of loads of large models by large groups: fst's planner on headers of real shapes, and counts of its plans."""
