"""NVIDIA backend of DeepInfer; `descriptor` is its light half, `backend` the heavy one."""
