"""Room: models/deepseek_v41."""
