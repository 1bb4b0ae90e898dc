"""Compare recipes over checkpoints, and artifacts: build, measure against one baseline, choose. Tiles: see tune/."""
