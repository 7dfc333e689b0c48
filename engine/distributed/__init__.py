"""Communication between ranks: collectives of plain values, the job's key-value store, buckets, ports."""
