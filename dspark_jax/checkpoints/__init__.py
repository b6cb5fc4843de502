"""Weights in and out: one file per outside format, and one that picks the reader."""
