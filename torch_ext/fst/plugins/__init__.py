"""What other programs load by themselves once fst is installed: each module is an entry point of one of them."""
