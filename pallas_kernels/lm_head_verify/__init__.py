"""Verification straight from hidden states: the LM head's product and `verify` in one sweep over the vocabulary."""
