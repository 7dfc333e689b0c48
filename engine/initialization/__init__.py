"""Weights of a module before its first step: materialized from the meta device, or read from files."""
