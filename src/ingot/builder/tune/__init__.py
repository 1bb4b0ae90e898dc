"""ingot tune: measures which tiles of each matmul are fastest on this GPU."""
