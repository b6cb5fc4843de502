"""Drafters, one file each, behind one small protocol (`base.Drafter`)."""
