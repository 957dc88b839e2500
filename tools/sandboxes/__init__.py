"""The service of tools/serve_sandboxes.py."""
