"""`ingot tune`: measures which tiles of each matmul are fastest on this GPU. Tables of tiles and safe choices are in
`pipeline.targets.cuda.tiles`, where builds read them."""
