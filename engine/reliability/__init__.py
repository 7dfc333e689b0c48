"""Detects and reports failures: heartbeat, watchdog, failure reports, signals, surviving ranks."""
