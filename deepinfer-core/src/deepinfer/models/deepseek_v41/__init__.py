"""The DeepSeek-V4.1 family: config, topology, checkpoint map, weights and graph."""
