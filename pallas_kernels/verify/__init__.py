"""Verification of drafted blocks: accepted lengths and added tokens from the target's logits, each read once."""
