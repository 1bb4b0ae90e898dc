"""Array types of the numerics and of the passes that use them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
CodeArray = NDArray[np.integer[Any]]  # codes of a quantized weight: int8 or uint8
