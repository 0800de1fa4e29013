"""Runs on disk: written whole, looked up, exported."""
