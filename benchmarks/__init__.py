"""Programs that measure: `python -m benchmarks.speed.step_time` in the folder of the checkout."""
