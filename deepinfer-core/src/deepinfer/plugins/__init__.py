"""Hook specifications, discovery of plugins, API handshake and selection of the accelerator (imports no torch)."""
