"""Helpers shared by the tests: a straight-line driver of a model, a recording kernel table and golden data."""
