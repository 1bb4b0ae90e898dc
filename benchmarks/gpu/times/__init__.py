"""Parts of the GPU benchmark that measure: the GPU, steps, the engine, tiers, torch, tiles."""
