"""Builds what the documentation site needs beside its pages: pictures, generated references, and hooks of mkdocs."""
