"""The smallest complete backend for DeepInfer."""
