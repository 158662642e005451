"""Grammars for tests of their compilation."""

from __future__ import annotations

__all__ = ["ENDLESS_SCHEMA"]

ENDLESS_SCHEMA = '{"type":"array","items":' * 700 + "{}" + "}" * 700
"""A JSON schema whose compilation takes minutes on any machine."""
