"""Groups of ranks and what they say to each other: collectives of plain values, the job's store, buckets, ports."""
