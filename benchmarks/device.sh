#!/usr/bin/env bash
# Checks and measures the NVIDIA backend on this machine in one go; results go to the folder given (default: results).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-results}" && cd "${1:-results}" && pwd)
export OMP_NUM_THREADS=1
python -m pip install -q -e ./deepinfer-core -e ./deepinfer-backend-cuda pytest
python -m pytest -q tests/contracts --backend nvidia --size tiny --size odd | tee "$out/contracts.log"
python benchmarks/cuda_step.py --output "$out/step.json" | tee "$out/step.log"
