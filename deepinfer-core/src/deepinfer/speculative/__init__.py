"""How many drafts are worth verifying: calibrated confidences, the cost of a step, and the schedule (no torch)."""
