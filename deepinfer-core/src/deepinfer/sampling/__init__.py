"""What a request asks of the sampler, and the noise that its draws use."""
