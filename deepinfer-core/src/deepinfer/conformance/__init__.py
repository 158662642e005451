"""Tests that a backend must pass, written once for every backend: values, edges, side effects, determinism.

suite = Suite(backend)
suite.check("rms_norm", "odd")          # raises ConformanceFailure
"""

from deepinfer.conformance.compare import ConformanceFailure
from deepinfer.conformance.suite import CHECKS, Suite

__all__ = ["CHECKS", "ConformanceFailure", "Suite"]
