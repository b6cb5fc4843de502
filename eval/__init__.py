"""Measurement: speedup and accepted length, step times, bandwidth."""
