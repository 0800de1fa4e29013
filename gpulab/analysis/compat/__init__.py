"""Figures of other tools under their own names, so that their users find them again."""
