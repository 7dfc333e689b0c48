"""Faults and endings: heartbeat, watchdog, failure reports, signals, the ranks that are left."""
