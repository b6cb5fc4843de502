"""The sequential head's left-to-right loop over one drafted block: bias, draw, next step, in one kernel."""
