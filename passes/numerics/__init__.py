"""The algorithms of the passes in plain numpy: rounding, scale search, GPTQ, knapsack, Hadamard, masks."""
