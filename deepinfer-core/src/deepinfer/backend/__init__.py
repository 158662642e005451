"""What a backend is (device, kernels, weight layout, collectives) and which function each op is bound to."""
