"""Model families; each registers through the models hook."""
