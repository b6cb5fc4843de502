"""Distillation: make data, train a drafter, evaluate it by decoding."""
