"""Submitting, launching and watching runs."""
