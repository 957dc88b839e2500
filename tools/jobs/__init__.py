"""Submitting runs, and watching them."""
