"""Ascend 950 backend of DeepInfer."""
