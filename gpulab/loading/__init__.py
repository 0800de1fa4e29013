"""Trace files, and folders of them, as the record: what the readers found and the steps in it, joined."""
