"""The step loop in a process of its own."""
