"""What third parties run to show that a backend keeps the op contracts."""
