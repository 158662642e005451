"""Stores below the device: where pages and snapshots survive eviction and restarts."""
