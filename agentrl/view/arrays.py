"""The type of a column of numbers."""

from typing import Any

from numpy.typing import NDArray

Column = NDArray[Any]
